"""An engine whose thread does not come back from a step: its callers and its end do not wait."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from looseleaf import AsyncLLM, SamplingParams
from looseleaf.engine.engine import Engine
from looseleaf.errors import DeadlineExceeded, EngineClosed, EngineFault
from looseleaf.llm import async_llm
from tests.engine.harness import Folder, words

ENDLESS = SamplingParams(max_tokens=150, ignore_eos=True)
PROMPT: Any = [words(1, 19)]


class Gate:
    """Has steps of an engine stand still until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_by(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made, step = Gate(), Engine.step

    def slow(engine: Engine) -> Any:
        made.pass_by()
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)
    yield made
    made.opened.set()


def run(checkpoint: Folder, scenario: Callable[[AsyncLLM], Awaitable[None]]) -> AsyncLLM:
    async def limited() -> AsyncLLM:
        llm = AsyncLLM(checkpoint(), dtype="float32", device="cpu", num_pages=96)
        async with asyncio.timeout(30):
            await scenario(llm)
        return llm

    return asyncio.run(limited())


async def begun(llm: AsyncLLM, gate: Gate, deadline: float | None = None) -> "asyncio.Task[Any]":
    """A request in the middle of a step."""
    stream = llm.generate(PROMPT, ENDLESS, deadline=deadline)
    task = asyncio.ensure_future(anext(stream))
    await asyncio.to_thread(gate.reached.wait, 30)
    return task


def test_a_deadline_holds_while_the_engine_stands_still(
    checkpoint: Folder, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm, "_GRACE_SECONDS", 0.01)

    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await (await begun(llm, gate, deadline=0.05))
        gate.opened.set()
        await asyncio.to_thread(llm.close)

    run(checkpoint, scenario)


def test_the_end_does_not_wait_for_a_step_that_stands_still_and_all_who_wait_are_told(
    checkpoint: Folder, gate: Gate
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        streaming = await begun(llm, gate)
        # behind the step: neither has begun when the end comes
        waiting = asyncio.ensure_future(anext(llm.generate(PROMPT, ENDLESS)))
        asking = asyncio.ensure_future(llm.documents())
        await asyncio.sleep(0)
        assert not await llm.drain(0.01, patience=0.01)
        for task in (streaming, waiting, asking):
            with pytest.raises(EngineClosed, match="does not respond"):
                await task
        gate.opened.set()
        assert await asyncio.to_thread(llm.close)

    assert not run(checkpoint, scenario).is_open


def test_how_long_a_step_has_taken_is_known_and_nothing_is_between_steps(
    checkpoint: Folder, gate: Gate
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        assert llm.busy_seconds == 0.0
        task = await begun(llm, gate)
        first = llm.busy_seconds
        assert 0.0 < first < llm.busy_seconds
        gate.opened.set()
        await task
        await llm.drain(30)
        assert llm.busy_seconds == 0.0

    run(checkpoint, scenario)


def test_an_engine_that_broke_says_so_and_is_drained_at_once(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Engine) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(Engine, "step", broken)

    async def scenario(llm: AsyncLLM) -> None:
        assert llm.fault is None
        with pytest.raises(EngineFault, match="planted"):
            await anext(llm.generate(PROMPT, ENDLESS))
        assert not await llm.drain()
        assert isinstance(llm.fault, EngineFault)

    run(checkpoint, scenario)
