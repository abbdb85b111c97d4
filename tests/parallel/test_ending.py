"""The end of ranks whose captured graphs hold operations of NCCL."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from looseleaf.engine.lifetime import close
from looseleaf.parallel import collectives
from looseleaf.parallel.collectives import NcclGroup


class Group:
    """A group whose end waits for the end of graphs, as NCCL's does."""

    def __init__(self) -> None:
        self.without_graphs, self.ended = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.without_graphs.wait()
        self.ended.set()


def test_graphs_end_before_the_ranks() -> None:
    ended: list[str] = []
    ranks = SimpleNamespace(
        dismiss=lambda: ended.append("link"), close=lambda: ended.append("ranks")
    )
    tiering: Any = SimpleNamespace(ranks=ranks, tiers=None, close=lambda: None)
    indexing: Any = SimpleNamespace(close=lambda: None)
    graphs = SimpleNamespace(clear=lambda: ended.append("graphs"))
    runner: Any = SimpleNamespace(pool=SimpleNamespace(kv=torch.zeros(1)), captures=[graphs])
    close(indexing, tiering, runner, [])
    assert ended == ["link", "graphs", "ranks"]


def test_a_lost_rank_does_not_wait_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_ABORT_SECONDS", 0.01)
    group = Group()
    NcclGroup(group, 2).close()
    assert not group.ended.is_set()
    group.without_graphs.set()
    assert group.ended.wait(60)


def test_the_store_of_a_group_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_ABORT_SECONDS", 0.01)
    (folder := tmp_path / "ranks").mkdir()
    group = Group()
    NcclGroup(group, 2, folder).close()
    assert folder.exists()
    group.without_graphs.set()
    for thread in threading.enumerate():
        if thread.name == "looseleaf-nccl":
            thread.join(60)
    assert not folder.exists()
