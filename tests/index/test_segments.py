"""A segment's indexes: resumable builds, and searches from threads and processes."""

import multiprocessing
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from looseleaf.config import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index import Heads, SegmentIndex, build_segment, search
from looseleaf.index.segment import bounded_map
from tests.index.vectors import Made, layer

HEADS = Heads(2, 4, 2)
CONFIG = IndexConfig("graph", sink=4, local=16, degree=8, top=20)


def found(index: SegmentIndex, layer_: int = 1, head: int = 3) -> list[list[int]]:
    _, queries = layer(1, 40, 16, seed=5)
    return search(index.at(layer_, head), queries, 10).ids.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("kind", ["flat", "ivf", "graph"])
def test_a_segment_has_an_index_a_head_and_comes_back_from_arrays(kind: str, per: str) -> None:
    config = IndexConfig(kind=kind, per=per, sink=4, local=16, degree=8)  # type: ignore[arg-type]
    index = build_segment(Made(400), 400, HEADS, config)
    assert len(index.units) == (4 if per == "kv_head" else 8)
    assert index.indexed == range(4, 384)
    assert len(index.at(0, 0)) == 380
    assert (index.at(0, 0) is index.at(0, 1)) == (per == "kv_head")
    again = SegmentIndex.load(index.arrays(), Made(400))
    assert found(again) == found(index)
    assert again.config == config and again.num_bytes == index.num_bytes


def test_sink_and_local_keys_are_not_indexed_and_a_short_segment_has_none() -> None:
    made = Made(30)
    index = build_segment(made, 30, HEADS, CONFIG)
    assert torch.equal(index.at(1, 0).keys.gather(slice(0, None)), made.keys(1, 0)[4:14])
    short = build_segment(Made(20), 20, HEADS, CONFIG)
    assert len(short.indexed) == 0 and found(short) == [[-1] * 10] * 40


def test_a_build_that_was_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from looseleaf.index import build_segment\n"
        "from tests.index.test_segments import CONFIG, HEADS\n"
        "from tests.index.vectors import Made\n"
        "from pathlib import Path\n"
        "def stop(done, total):\n"
        "    if done == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"build_segment(Made(400), 400, HEADS, CONFIG, folder=Path({str(tmp_path)!r}), "
        "on_progress=stop)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    assert done.returncode == -9
    assert len(list(tmp_path.glob("*.npz"))) == 2
    parts = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")}
    progress: list[tuple[int, int]] = []
    index = build_segment(
        Made(400), 400, HEADS, CONFIG, folder=tmp_path,
        on_progress=lambda *step: progress.append(step),
    )  # fmt: skip
    assert progress == [(n, 4) for n in range(5)]
    assert all(path.stat().st_mtime_ns == when for path, when in parts.items())
    assert len(list(tmp_path.glob("*.npz"))) == 4
    assert found(index) == found(build_segment(Made(400), 400, HEADS, CONFIG))


@pytest.mark.parametrize("kind", ["auto", "flat", "ivf", "graph"])
def test_several_workers_build_what_one_does(kind: str, tmp_path: Path) -> None:
    config = IndexConfig(kind, sink=4, local=16, degree=8, top=20)  # type: ignore[arg-type]
    told: list[tuple[int, int]] = []
    several = build_segment(
        Made(400), 400, HEADS, config, folder=tmp_path, workers=3,
        on_progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    if kind != "auto":  # which measures time
        assert found(several) == found(build_segment(Made(400), 400, HEADS, config))
    assert sorted(told) == [(done, 4) for done in range(5)] and told[0] == (0, 4)
    assert list(several.units) == HEADS.units(config) and len(list(tmp_path.iterdir())) == 4


def test_a_build_that_is_given_up_ends_behind_the_few_that_were_handed_in() -> None:
    begun: list[int] = []

    def act(number: int) -> int:
        begun.append(number)
        return -number

    with ThreadPoolExecutor(2) as threads:
        assert list(bounded_map(threads, act, range(10), 3)) == [-n for n in range(10)]
        begun.clear()
        results = bounded_map(threads, act, range(100), 3)
        assert [next(results) for _ in range(5)] == [0, -1, -2, -3, -4]
        results.close()
    assert 5 <= len(begun) <= 5 + 3


def test_damaged_and_foreign_parts_are_built_again(tmp_path: Path) -> None:
    whole = build_segment(Made(400), 400, HEADS, CONFIG, folder=tmp_path)
    for number, part in enumerate(sorted(tmp_path.glob("*.npz"))):
        raw = part.read_bytes()
        part.write_bytes(raw[: len(raw) // 2] if number % 2 else b"")
    assert found(build_segment(Made(400), 400, HEADS, CONFIG, folder=tmp_path)) == found(whole)
    build_segment(Made(300), 300, HEADS, CONFIG, folder=tmp_path)
    assert len(list(tmp_path.glob("*.npz"))) == 8


def test_a_part_that_can_not_be_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_segment(Made(400), 400, HEADS, CONFIG, folder=tmp_path)
    part = min(tmp_path.glob("*.npz"))
    part.write_bytes(b"")
    build_segment(Made(400), 400, HEADS, CONFIG, folder=tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert part.name in caplog.text
    assert "built again" in caplog.text


def test_a_part_that_can_not_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: BinaryIO, **arrays: object) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    built = build_segment(Made(400), 400, HEADS, CONFIG, folder=tmp_path)
    # the index is whole, and a full disk does not stay so
    assert built.arrays() and list(tmp_path.iterdir()) == []


class Listed(dict[str, "np.ndarray[Any, Any]"]):
    """Arrays that count how often all of them are gone through."""

    times = 0

    def items(self) -> Any:
        self.times += 1
        return super().items()


def test_all_arrays_are_gone_through_once_however_many_indexes_they_are() -> None:
    arrays = Listed(build_segment(Made(400), 400, HEADS, CONFIG).arrays())
    assert len(SegmentIndex.load(arrays, Made(400)).units) == 4
    assert arrays.times == 1


def test_threads_find_what_one_thread_finds() -> None:
    index = build_segment(Made(1500), 1500, HEADS, CONFIG)
    expected = found(index)
    start = threading.Barrier(4)

    def work(_: int) -> bool:
        start.wait()
        return all(found(index) == expected for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def _in_child(arrays: dict[str, object], results: "multiprocessing.Queue[object]") -> None:
    torch.set_num_threads(1)
    results.put(found(SegmentIndex.load(arrays, Made(400))))  # type: ignore[arg-type]


def test_another_process_finds_the_same_from_the_arrays() -> None:
    index = build_segment(Made(400), 400, HEADS, CONFIG)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=_in_child, args=(index.arrays(), results))
    child.start()
    assert results.get(timeout=120) == found(index)
    child.join()
    assert child.exitcode == 0


def test_a_side_car_of_another_segment_is_refused() -> None:
    arrays = build_segment(Made(400), 400, HEADS, CONFIG).arrays()
    with pytest.raises(InvalidOption, match="400 tokens"):
        SegmentIndex.load(arrays, Made(300))
    with pytest.raises(InvalidOption, match="header"):
        SegmentIndex.load({n: a for n, a in arrays.items() if n != "header"}, Made(400))
    with pytest.raises(InvalidOption, match="damaged"):
        SegmentIndex.load({n: a for n, a in arrays.items() if n != "1.1.links"}, Made(400))
