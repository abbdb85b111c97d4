"""Deadlines, cancellation and closing: whoever must end does so within a step, whoever may, ends
whole."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from looseleaf import LLM, AsyncLLM, SamplingParams
from looseleaf.engine.progress import Deadlines, RequestProgress
from looseleaf.errors import DeadlineExceeded, EngineClosed, InvalidOption
from looseleaf.prompt.request import Request
from tests.engine.harness import Folder, assert_idle, document, drawn, make_llm, words

LEAD, A = words(1, 19), document(1, 60)
PROMPTS = [[LEAD, A, words(10 + n, 9)] for n in range(8)]
ENDLESS = SamplingParams(max_tokens=150, ignore_eos=True)


@pytest.fixture
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint(), max_num_batched_tokens=16, max_num_seqs=2)


def request(llm: LLM, name: str, number: int, deadline: float | None = None) -> Request:
    parts = llm.engine.prompts.from_parts(PROMPTS[number])
    return Request(name, parts, ENDLESS, deadline=deadline)


@pytest.mark.parametrize("steps", [0, 2, 12], ids=["waiting", "prefill", "decode"])
def test_a_request_past_its_deadline_ends_at_the_next_step_and_frees_its_pages(
    llm: LLM, steps: int
) -> None:
    engine = llm.engine
    # it arrived so long ago that only ``steps`` of it fit, as the clock of the test has it
    late = engine.add(request(llm, "late", 0, deadline=1000.0))
    other = engine.add(request(llm, "other", 1))
    for _ in range(steps):
        engine.step()
    held = engine.store.page_counts
    late.arrived -= 1000.0
    engine._deadlines.add(late)
    changed = engine.step()
    engine.check()
    assert late in changed
    assert isinstance(late.error, DeadlineExceeded)
    assert isinstance(late.error, TimeoutError)
    assert "1000.0 s" in str(late.error)
    assert not late.outputs[0].sequence.tail.pages
    assert engine.store.page_counts.tails <= held.tails + 2
    assert other.error is None
    engine.abort("other")
    assert_idle(llm)
    counters = engine.counters
    assert (counters.deadline_exceeded, counters.aborted, counters.failed) == (1, 1, 0)


def test_a_request_within_its_deadline_hears_nothing_of_it(llm: LLM) -> None:
    (output,) = llm.generate([PROMPTS[0]], drawn(1), deadline=600.0)
    assert output.outputs[0].finish_reason == "length"
    llm.engine.step()
    assert llm.engine.counters.deadline_exceeded == 0


def test_a_request_that_has_ended_is_not_kept_until_its_deadline(llm: LLM) -> None:
    ended = weakref.ref(llm.engine.add(request(llm, "ended", 0, deadline=600.0)))
    llm.engine.step()
    llm.engine.abort("ended")
    llm.engine.step()
    gc.collect()
    assert ended() is None


def test_names_of_requests_that_have_ended_are_fewer_than_those_of_others(llm: LLM) -> None:
    deadlines, day = llm.engine._deadlines, 86400.0
    late = llm.engine.add(request(llm, "late", 0, deadline=2 * day))
    for number in range(40):
        llm.engine.add(request(llm, f"short-{number}", 1, deadline=day))
        llm.engine.abort(f"short-{number}")
        llm.engine.step()
        assert len(deadlines) <= 2, "they must not be kept for a day"
    # the one that goes on is still watched
    late.arrived -= 2 * day
    deadlines.add(late)
    llm.engine.step()
    assert isinstance(late.error, DeadlineExceeded)
    assert_idle(llm)


def test_names_are_gone_through_no_more_often_than_they_come(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuilt: list[int] = []

    def heapify(entries: list[tuple[float, str]]) -> None:
        rebuilt.append(len(entries))

    monkeypatch.setattr("looseleaf.engine.progress.heapify", heapify)
    deadlines = Deadlines()
    requests: dict[str, RequestProgress] = {}
    for number in range(64):
        progress = llm.engine.add(request(llm, f"r{number}", 0, deadline=1000.0 + number))
        requests[f"r{number}"] = progress
        deadlines.add(progress)
    for number in range(64):
        assert deadlines.expired(0.0, requests) == []
        del requests[f"r{number}"]
        llm.engine.abort(f"r{number}")
    assert sum(rebuilt) <= 64, "each name that goes pays for one that stays"
    assert_idle(llm)


def test_a_deadline_holds_for_its_own_request_and_no_later_one_of_that_name(llm: LLM) -> None:
    first = llm.engine.add(request(llm, "again", 0, deadline=1000.0))
    llm.engine.abort("again")
    second = llm.engine.add(request(llm, "again", 1, deadline=5000.0))
    first.arrived -= 1000.0
    llm.engine._deadlines.add(first)
    llm.engine.step()
    assert second.error is None
    llm.engine.abort("again")
    assert_idle(llm)


def test_generate_and_chat_raise_it(llm: LLM) -> None:
    with pytest.raises(DeadlineExceeded):
        llm.generate(PROMPTS, ENDLESS, deadline=1e-6)
    with pytest.raises(DeadlineExceeded):
        llm.chat([{"role": "user", "content": "who?"}], ENDLESS, deadline=1e-6)
    assert_idle(llm)


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_that_is_no_time_is_refused(llm: LLM, deadline: float) -> None:
    with pytest.raises(InvalidOption, match="positive number of seconds"):
        request(llm, "never", 0, deadline)


def test_an_aborted_request_holds_no_page_before_the_next_step(llm: LLM) -> None:
    engine = llm.engine
    for steps in (0, 1, 3, 9):
        engine.store.evict_idle()
        free = engine.store.pool.num_free
        engine.add(request(llm, "victim", 0))
        for _ in range(steps):
            engine.step()
        engine.abort("victim")
        counts = engine.store.page_counts
        assert (counts.tails, counts.referenced) == (0, 0)
        assert counts.free + counts.idle == free
        engine.check()
    assert engine.counters.aborted == 4


def run(checkpoint: Folder, work: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
    async def limited() -> None:
        llm = AsyncLLM(checkpoint(), **{"dtype": "float32", "num_pages": 96, **options})
        try:
            async with asyncio.timeout(60):
                await work(llm)
        finally:
            await asyncio.to_thread(llm.close)
        llm.engine.check()

    asyncio.run(limited())


async def between_steps(llm: AsyncLLM) -> None:
    """Let the engine and the other tasks go on by a step."""
    await llm.call(lambda _: None)


async def last(stream: Any) -> Any:
    return [output async for output in stream][-1]


def test_a_stream_past_its_deadline_raises_and_others_go_on(checkpoint: Folder) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        good = asyncio.create_task(last(llm.generate(PROMPTS[0], drawn(1))))
        with pytest.raises(DeadlineExceeded):
            await last(llm.generate(PROMPTS[1], ENDLESS, deadline=0.02))
        assert len((await good).token_ids) == 6
        assert await llm.call(lambda engine: engine.has_work) is False

    run(checkpoint, scenario)


def test_draining_cuts_nothing_and_takes_nothing_new(checkpoint: Folder) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)

    async def scenario(llm: AsyncLLM) -> None:
        started = [llm.generate(prompt, params) for prompt in PROMPTS]
        tasks = [asyncio.create_task(last(stream)) for stream in started]
        # all are accepted; with two at a time most of them still wait in line
        while llm.snapshot().counters.requests < len(PROMPTS):
            await between_steps(llm)
        assert llm.snapshot().waiting > 0
        drained = asyncio.create_task(llm.drain())
        await between_steps(llm)
        assert not llm.is_open
        with pytest.raises(EngineClosed, match="finishes its requests"):
            await last(llm.generate(PROMPTS[0], params))
        with pytest.raises(EngineClosed):
            await last(llm.register(A))
        outputs = await asyncio.gather(*tasks)
        assert [len(output.token_ids) for output in outputs] == [60] * len(PROMPTS)
        assert await drained
        with pytest.raises(EngineClosed, match="make a new one"):
            await last(llm.generate(PROMPTS[0], params))

    run(checkpoint, scenario, max_num_seqs=2, max_num_batched_tokens=64)


def test_draining_with_a_time_limit_ends_and_says_that_it_cut(checkpoint: Folder) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        task = asyncio.create_task(last(llm.generate(PROMPTS[0], ENDLESS)))
        while not llm.snapshot().running:
            await between_steps(llm)
        assert not await llm.drain(timeout=0.0)
        with pytest.raises(EngineClosed, match="not complete"):
            await task

    run(checkpoint, scenario)


def test_draining_an_idle_engine_closes_it_at_once(checkpoint: Folder) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        assert await llm.drain()
        assert not llm.is_open

    run(checkpoint, scenario)


def test_registering_and_holding_go_on_while_the_engine_drains(checkpoint: Folder) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        registration = llm.register(A)
        first = await anext(registration)
        drained = asyncio.create_task(llm.drain())
        assert first.state == "computing"
        assert await drained
        assert llm.engine.documents.stat(first.id).state == "ready"

    run(checkpoint, scenario, max_num_seqs=2, max_num_batched_tokens=16)
