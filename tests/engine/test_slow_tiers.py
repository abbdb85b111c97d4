"""A tier that is slow, or an error while one is asked, costs those that need its documents time,
and nobody else anything."""

import asyncio
import threading
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from looseleaf import LLM, AsyncLLM
from looseleaf.errors import DeadlineExceeded, EngineFault
from looseleaf.kv.store import Segment
from looseleaf.prompt.request import Request
from looseleaf.tiers import Load, Record
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.transfer.load import Heartbeat
from looseleaf.tiers.transfer.pool_copy import PoolCopy
from tests.engine.harness import Folder, assert_idle, words
from tests.engine.tiered import (
    PARAMS,
    forget_pool,
    load_always,
    make_unruly,
    prompts,
    sources,
    tiered,
)

SECONDS = 15.0


@pytest.fixture
def llm(checkpoint: Folder, tmp_path: Path) -> LLM:
    """An engine whose documents are on disk and not in its pool."""
    made = tiered(checkpoint(), tmp_path / "cache", tier_timeout=SECONDS)
    made.generate(prompts(), PARAMS)
    forget_pool(made)
    load_always(made)
    return made


class Gate:
    """Keeps every layer but the first from coming, from when it is ``reached``, until it opens."""

    def __init__(self, llm: LLM | AsyncLLM) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        make_unruly(llm, self._mood)  # type: ignore[arg-type]

    def _mood(self, call: str, layer: int) -> None:
        if call == "read" and layer > 0:
            self.reached.set()
            assert self.opened.wait(SECONDS)


def request(llm: LLM, name: str, prompt: list[Any], deadline: float | None = None) -> Request:
    return Request(name, llm.engine.prompts.from_parts(prompt), PARAMS, deadline=deadline)


@pytest.mark.parametrize("begun", [False, True], ids=["before a load", "behind its begin"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_while_a_request_is_admitted_leaves_nothing_behind(
    llm: LLM, error: type[BaseException], begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = llm.generate(prompts(1), PARAMS)
    forget_pool(llm)
    tiering = llm.engine.tiering
    begin = tiering.begin

    def interrupted(*what: Any) -> Any:
        monkeypatch.undo()
        if begun:
            begin(*what)
        raise error("planted")

    monkeypatch.setattr(tiering, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else EngineFault):
        llm.generate(prompts(2)[1:], PARAMS)
    assert_idle(llm)
    (again,) = llm.generate(prompts(1), PARAMS)
    assert again.token_ids == plain.token_ids
    llm.generate(prompts(), PARAMS)
    assert_idle(llm)
    llm.close()


def test_an_interrupt_while_pages_are_taken_leaves_those_of_the_prefix_to_the_cache(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, store = llm.engine, llm.engine.store
    begin = words(70, 60)
    llm.generate([[begin]], PARAMS)
    kept = len(store)

    def interrupted(*_: Any) -> Any:
        monkeypatch.undo()
        assert store.page_counts.referenced > 0, "pages of the prefix are held by then"
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "reserve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[begin, words(71, 9)]], PARAMS)
    assert_idle(llm)
    assert len(store) == kept and store.page_counts.referenced == 0
    store.evict_idle()
    assert len(store) == 0
    engine.check()
    llm.close()


def test_a_document_is_held_before_a_copy_of_it_is_on_its_way(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is interrupted in between leaves no copy of pages that are somebody else's by then."""
    llm = tiered(checkpoint(), tmp_path / "cache", tier_timeout=SECONDS)
    tiering, references = llm.engine.tiering, list[int]()
    keep = tiering._keep

    def looked(segment: Segment, *how: Any, **more: Any) -> Any:
        references.append(segment.references)
        return keep(segment, *how, **more)

    monkeypatch.setattr(tiering, "_keep", looked)
    llm.generate(prompts(1), PARAMS)
    # the request that computed it, and its way to the tiers
    assert references[0] == 2
    llm.close()


def test_a_request_without_documents_does_not_wait_for_anothers_to_come(llm: LLM) -> None:
    (plain,) = llm.generate(prompts(1), PARAMS)
    forget_pool(llm)
    gate, engine = Gate(llm), llm.engine
    # something else is always asked of it, as far as the engine knows
    engine.tiering.hurry = lambda: True
    slow = engine.add(request(llm, "slow", prompts(1)[0]))
    while not gate.reached.is_set():
        engine.step()
    engine.step()
    other = engine.add(request(llm, "other", [words(90, 12)]))
    while not other.finished:
        engine.step()
    assert other.error is None and not slow.finished and not gate.opened.is_set()
    gate.opened.set()
    while not slow.finished:
        engine.step()
    assert slow.error is None
    assert slow.output().token_ids == plain.token_ids
    assert sources(slow.output()) == ["loaded"]
    assert_idle(llm)
    llm.close()


def test_what_is_asked_of_a_working_engine_ends_its_wait_for_a_tier(
    checkpoint: Folder, tmp_path: Path, llm: LLM
) -> None:
    llm.close()
    options = {"num_pages": 60, "tier_timeout": SECONDS, "disk_path": str(tmp_path / "cache")}
    engine = AsyncLLM(checkpoint(), device="cpu", dtype="float32", **options)
    load_always(engine)  # type: ignore[arg-type]
    gate = Gate(engine)

    async def last(prompt: list[Any], name: str) -> Any:
        outputs = [output async for output in engine.generate(prompt, PARAMS, name)]
        return outputs[-1]

    async def both() -> Any:
        slow = asyncio.create_task(last(prompts(1)[0], "slow"))
        assert await asyncio.to_thread(gate.reached.wait, SECONDS)
        await last([words(90, 12)], "other")
        assert not gate.opened.is_set() and not slow.done()
        gate.opened.set()
        return await slow

    assert sources(asyncio.run(both())) == ["loaded"]
    engine.close()


def test_a_deadline_that_passes_while_a_tier_is_waited_for_is_kept(llm: LLM) -> None:
    engine = llm.engine
    late = engine.add(request(llm, "late", prompts(1)[0], deadline=1000.0))
    gate = threading.Event()

    def mood(call: str, layer: int) -> None:
        if call == "read" and layer > 0 and late.arrived > 0:
            late.arrived -= 1000.0 + late.arrived
            engine._deadlines.add(late)
            assert gate.wait(SECONDS)

    make_unruly(llm, mood)
    while late.error is None:
        engine.step()
    assert isinstance(late.error, DeadlineExceeded) and not gate.is_set()
    gate.set()
    assert_idle(llm)
    llm.close()


def test_a_load_in_line_behind_slow_ones_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("looseleaf.tiers.transfer.load.time.perf_counter", lambda: clock[0])
    record, copy, guard = (
        create_autospec(kind, instance=True) for kind in (Record, PoolCopy, Guard)
    )
    record.num_layers, copy.write_layers.return_value = 2, None
    first, second = (Load(record, (), copy, guard, 1.0, None) for _ in range(2))
    first.heartbeat = second.heartbeat = Heartbeat()
    clock[0] = 0.9
    assert first.deliver(0, torch.zeros(1, 4, dtype=torch.uint8))
    clock[0] = 1.8
    assert (first.state, second.state) == ("loading", "loading")
    guard.fail.assert_not_called()
    # but whoever brings them has given no sign of life for a second now
    clock[0] = 2.0
    assert (first.state, second.state) == ("failed", "failed")
    assert {call.args[0].kind for call in guard.fail.call_args_list} == {"timeout"}
