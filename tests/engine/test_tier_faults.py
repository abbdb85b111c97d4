"""Faults of tiers under load: every answer equals the one without, counters say what happened, and
nothing hangs."""

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM
from looseleaf.prompt.request import Request
from looseleaf.tiers.stores.disk_reader import DiskReader
from tests.engine.harness import Folder, assert_idle
from tests.engine.tiered import (
    PARAMS,
    forget_pool,
    load_always,
    make_unruly,
    prompts,
    raise_fault,
    tiered,
)
from tests.tiers.redis_server import RedisServer
from tests.tiers.test_damage import harm

TRIALS = 120
LONGEST = 120.0


def answers(llm: LLM, asked: list[Any], order: list[int] | None = None) -> list[tuple[int, ...]]:
    """The tokens of each prompt, asked all at once in some order; none of them fails or hangs."""
    engine, begun = llm.engine, time.monotonic()
    order = list(range(len(asked))) if order is None else order
    added = {
        n: engine.add(Request(f"{n}", engine.prompts.from_parts(asked[n]), PARAMS)) for n in order
    }
    while engine.has_work:
        engine.step()
        engine.check()
        assert time.monotonic() - begun < LONGEST
    assert all(progress.error is None for progress in added.values())
    return [added[n].output().token_ids for n in range(len(asked))]


@pytest.fixture
def right(checkpoint: Folder) -> list[tuple[int, ...]]:
    """The answers of an engine without tiers."""
    return answers(tiered(checkpoint()), prompts())


def test_files_that_are_cut_or_flipped_at_random_change_no_answer(
    checkpoint: Folder, tmp_path: Path, right: list[tuple[int, ...]]
) -> None:
    llm, rng = tiered(checkpoint(), tmp_path), random.Random(7)
    load_always(llm)
    asked = prompts()
    answers(llm, asked)
    forget_pool(llm)
    assert llm.engine.tiers is not None
    counters, harmed = llm.engine.tiers.counters["disk"], 0
    for _ in range(TRIALS):
        files = sorted(tmp_path.glob("*.segment"))
        for path in rng.sample(files, rng.randint(0, min(2, len(files)))):
            sound = path.read_bytes()
            broken = harm(bytearray(sound), rng)
            path.write_bytes(broken)
            harmed += broken != sound
        which = rng.randrange(len(asked))
        assert answers(llm, [asked[which]]) == [right[which]]
        forget_pool(llm)
    # a file may be harmed twice before somebody reads it, or never be read again
    assert set(counters.faults) == {"damaged"}
    assert TRIALS // 4 < counters.faults["damaged"] <= harmed
    assert counters.loads > TRIALS // 4
    assert_idle(llm)
    llm.close()


def _disk(llm: LLM) -> Any:
    assert llm.engine.tiers is not None
    return llm.engine.tiers.guards[-1].tier


def test_redis_killed_and_started_again_under_load_changes_no_answer(
    checkpoint: Folder, right: list[tuple[int, ...]]
) -> None:
    server = RedisServer.on_a_free_port()
    server.start()
    llm, rng = tiered(checkpoint(), remote_url=server.url), random.Random(3)
    load_always(llm)
    assert llm.engine.tiers is not None
    (guard,) = llm.engine.tiers.guards
    guard.breaker.cooldown = guard.writing.cooldown = 0.02
    asked, stop = prompts(), threading.Event()

    def torment() -> None:
        chance = random.Random(4)
        while not stop.is_set():
            stop.wait(chance.uniform(0.0, 0.2))
            server.kill()
            stop.wait(chance.uniform(0.0, 0.1))
            server.start()

    thread = threading.Thread(target=torment)
    thread.start()
    try:
        for _ in range(12):
            order = rng.sample(range(len(asked)), len(asked))
            assert answers(llm, asked, order) == right
            llm.engine.tiering.release_pages()
            llm.engine.store.evict_idle()
    finally:
        stop.set()
        thread.join(30)
    assert guard.counters.faults["unavailable"] > 0
    # and when it stays, it is used again
    guard.breaker.cooldown = guard.writing.cooldown = 0.0
    for _ in range(2):
        assert answers(llm, asked) == right
        forget_pool(llm)
    loads = guard.counters.loads
    assert answers(llm, asked) == right
    assert guard.counters.loads == loads + 4
    assert_idle(llm)
    llm.close()
    server.kill()


def test_a_disk_that_is_full_now_and_then_changes_no_answer(
    checkpoint: Folder, tmp_path: Path, right: list[tuple[int, ...]]
) -> None:
    llm, rng = tiered(checkpoint(), tmp_path), random.Random(5)
    load_always(llm)
    write = os.write

    def full(file: int, content: bytes) -> int:
        if rng.random() < 0.4:
            write(file, content[: rng.randrange(len(content))])
            raise OSError(28, "No space left on device")
        return write(file, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("looseleaf.tiers.stores.disk.os.write", full)
        for _ in range(10):
            assert answers(llm, prompts()) == right
            forget_pool(llm)
            _disk(llm).delete([e.key for e in _disk(llm).entries()][:1])
    assert llm.engine.tiers is not None
    assert llm.engine.tiers.counters["disk"].faults["full"] > 0
    assert all(wrong is None for _, wrong in _disk(llm).verify())
    assert list((tmp_path / "unfinished").iterdir()) == []
    llm.close()


@pytest.mark.parametrize("of", ["close", "observe"])
def test_a_fault_at_the_end_of_a_load_stops_no_later_one(
    checkpoint: Folder, tmp_path: Path, right: list[tuple[int, ...]], of: str
) -> None:
    llm = tiered(checkpoint(), tmp_path)
    load_always(llm)
    assert answers(llm, prompts()) == right
    tiers = llm.engine.tiers
    assert tiers is not None
    loader = tiers._loaders["disk"]
    left = [loader.num_threads]

    def fail_first(*_: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError("planted")

    with pytest.MonkeyPatch.context() as patch:
        if of == "close":
            patch.setattr(DiskReader, "close", lambda self: (os.close(self.file), fail_first()))
        else:
            patch.setattr(loader, "observe", fail_first)
        while left[0]:
            forget_pool(llm)
            assert answers(llm, prompts()) == right
    forget_pool(llm)
    before = tiers.counters["disk"].loads
    assert answers(llm, prompts()) == right
    assert tiers.counters["disk"].loads > before
    assert_idle(llm)
    llm.close()


def test_answers_do_not_depend_on_what_the_tiers_went_through_before(
    checkpoint: Folder, tmp_path: Path, right: list[tuple[int, ...]]
) -> None:
    """Engines of several sizes share a folder that holds too little, in any order of requests."""
    asked, rng, seen = prompts(), random.Random(6), set()
    for size, gib in ((20, 0.0), (24, 0.0001)):
        llm = tiered(checkpoint(), tmp_path, num_pages=size, disk_gib=0.0002, host_gib=gib)
        load_always(llm)
        for _ in range(4):
            order = rng.sample(range(len(asked)), len(asked))
            assert answers(llm, asked, order) == right
            llm.engine.tiering.release_pages()
            if rng.random() < 0.5:
                llm.engine.store.evict_idle()
        assert llm.engine.tiers is not None
        counters = llm.engine.tiers.counters.values()
        seen |= {k for c in counters for k in ("loads", "refused", "evicted") if getattr(c, k)}
        # what was found may have had to go before it was opened
        assert all(set(counter.faults) <= {"missing"} for counter in counters)
        llm.close()
    assert {"loads", "refused"} <= seen


def test_a_load_that_fails_when_a_step_has_followed_it_halfway_is_computed_whole(
    checkpoint: Folder, tmp_path: Path, right: list[tuple[int, ...]]
) -> None:
    llm = tiered(checkpoint(), tmp_path, tier_timeout=20.0)
    load_always(llm)
    asked = prompts()
    answers(llm, asked[:1])
    forget_pool(llm)
    attended, step = threading.Event(), llm.engine.runner.attention.step

    def watched(rows: Any) -> Any:
        attend = step(rows)

        def call(layer: int, *qkv: Any) -> Any:
            out = attend(layer, *qkv)
            if len(out) == len(asked[0][-1]):
                attended.set()
            return out

        call.reads = attend.reads  # type: ignore[attr-defined]
        return call

    def mood(call: str, layer: int) -> None:
        if call == "read" and layer == 1:
            assert attended.wait(15)
            raise_fault("damaged")

    make_unruly(llm, mood)
    llm.engine.runner.attention.step = watched  # type: ignore[method-assign]
    assert answers(llm, asked[:1]) == right[:1]
    assert llm.engine.tiers is not None
    assert llm.engine.tiers.counters["disk"].faults == {"damaged": 1}
    assert_idle(llm)
    llm.close()
