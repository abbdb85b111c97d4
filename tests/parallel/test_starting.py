"""Ranks that fail while the engine starts."""

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf.errors import EngineFault
from looseleaf.llm import ranks
from looseleaf.llm.llm import make_config
from looseleaf.parallel import RankProcesses
from tests.parallel import failing_ranks
from tests.parallel.test_processes import is_running


@pytest.mark.parametrize(
    ("way", "message"),
    [("reports", r"rank 1 .* failed \(ImportError: no such library"), ("dies", "rank 1 .* ended")],
)
def test_a_rank_that_fails_at_its_start_ends_the_start_with_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, message: str
) -> None:
    started: list[RankProcesses] = []

    def start(_module: str, size: int) -> RankProcesses:
        started.append(RankProcesses(failing_ranks.__name__, size))
        return started[0]

    def wait_for_ranks(*_: Any) -> None:
        # the collectives have a time limit of minutes
        raise AssertionError("rank 0 waits for a rank that has ended")

    monkeypatch.setenv("FAILING_RANK", way)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ranks, "RankProcesses", start)
    monkeypatch.setattr(ranks, "make_collectives", wait_for_ranks)
    config = make_config({"device": "cpu", "threads": 1, "tensor_parallel": 3})
    with pytest.raises(EngineFault, match=message):
        ranks.start_ranks(partial(os.abort), config, torch.device("cpu"))
    assert not any(map(is_running, started[0].pids))
    assert not [*tmp_path.iterdir()]
