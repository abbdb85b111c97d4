"""A fault ends the requests it concerns and no other, and leaves every page where it belongs."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from looseleaf import LLM, AsyncLLM, SamplingParams
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.sampling.state import SamplingState
from looseleaf.errors import EngineClosed, EngineFault, IntegrityError
from looseleaf.models.tokenizer.detokenizer import Detokenizer
from looseleaf.prompt.request import Request
from looseleaf.sampling_params import Grammar
from tests.engine.harness import Folder, assert_idle, document, drawn, make_llm, words

LEAD, A = words(1, 19), document(1, 40)
PROMPTS = [[LEAD, A, words(10 + n, 9)] for n in range(4)]
VICTIM = 1


class Planted(RuntimeError):
    """The fault that a test injects."""


@pytest.fixture
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint())


def params(number: int) -> SamplingParams:
    grammar = Grammar.regex("[a-z]{30}") if number == VICTIM else None
    return drawn(number, max_tokens=8, grammar=grammar)


def add_all(engine: Engine) -> list[RequestProgress]:
    return [
        engine.add(Request(f"r{n}", engine.prompts.from_parts(prompt), params(n)))
        for n, prompt in enumerate(PROMPTS)
    ]


def finish(llm: LLM) -> list[RequestProgress]:
    changed = []
    while llm.engine.has_work:
        changed += llm.engine.step()
        llm.engine.check()
    assert_idle(llm)
    return changed


def raise_planted(*_: object, **__: object) -> Any:
    raise Planted("planted")


def plant(progress: RequestProgress, where: str, patch: pytest.MonkeyPatch) -> None:
    """Break one part of one output."""
    (output,) = progress.outputs
    if where == "detokenizer":
        patch.setattr(output, "detokenizer", BrokenDetokenizer())
    elif where == "stop checker":
        patch.setattr(output.stop, "push", raise_planted)
    elif where == "draw":
        patch.setattr(output.sampling, "draw", raise_planted)
    elif where == "mask":
        patch.setattr(output.sampling.grammar, "allowed", raise_planted)
    else:
        patch.setattr(output.sampling.grammar, "push", raise_planted)


class BrokenDetokenizer(Detokenizer):
    """It has never been made ready."""

    def __init__(self) -> None:
        pass

    def push(self, token_id: int) -> str:
        raise Planted(f"no text for {token_id}")


@pytest.mark.parametrize("at_step", [0, 3])
@pytest.mark.parametrize("where", ["detokenizer", "stop checker", "draw", "mask", "grammar"])
def test_a_fault_of_one_request_ends_that_one_alone(
    checkpoint: Folder, llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, at_step: int
) -> None:
    expected = add_all(llm.engine)
    finish(llm)
    llm.engine.store.evict_idle()
    requests = add_all(llm.engine)
    for _ in range(at_step):
        llm.engine.step()
    plant(requests[VICTIM], where, monkeypatch)
    changed = finish(llm)
    assert requests[VICTIM] in changed
    error = requests[VICTIM].error
    assert isinstance(error, EngineFault)
    assert isinstance(error.__cause__, Planted)
    assert requests[VICTIM].output().outputs[0].finish_reason == "abort"
    for number, (mine, right) in enumerate(zip(requests, expected, strict=True)):
        if number != VICTIM:
            assert mine.error is None
            assert mine.output().token_ids == right.output().token_ids
    counters = llm.engine.counters
    assert (counters.failed, counters.finished) == (1, 7)


def test_a_fault_of_one_sibling_ends_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm.engine
    parts = engine.prompts.from_parts(PROMPTS[0])
    several = engine.add(Request("several", parts, drawn(0, n=3)))
    other = engine.add(Request("other", parts, drawn(1)))
    engine.step()
    monkeypatch.setattr(several.outputs[1].sampling, "draw", raise_planted)
    finish(llm)
    assert isinstance(several.error, EngineFault)
    assert {o.finish_reason for o in several.output().outputs} == {"abort"}
    assert len(other.output().token_ids) == 6


@pytest.mark.parametrize("part", ["runner.run", "_scheduler.complete", "documents.note_admission"])
def test_a_fault_of_a_step_ends_the_requests_of_that_step(
    checkpoint: Folder, llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Who only waits for a document that the step was computing, or for his turn, goes on."""
    engine = llm.engine
    requests = add_all(engine)
    owner, name = part.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(engine, owner), name, raise_planted)
        ended = engine.step()
    engine.check()
    assert ended
    assert all(isinstance(p.error, EngineFault) for p in ended)
    assert all(isinstance(p.error.__cause__, Planted) for p in ended if p.error)
    finish(llm)
    for progress in requests:
        assert (progress in ended) == (progress.error is not None)
        if progress not in ended:
            assert len(progress.output().token_ids) == 8
    # and whoever comes later finds nothing that is half written
    again = [Request(f"again {n}", p.request.parts, params(n)) for n, p in enumerate(requests)]
    redone = [engine.add(request) for request in again]
    finish(llm)
    fresh = make_llm(checkpoint())
    right = add_all(fresh.engine)
    finish(fresh)
    assert [p.output().token_ids for p in redone] == [p.output().token_ids for p in right]


def test_a_device_that_cannot_go_on_breaks_the_engine_with_the_first_fault(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(device: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr("looseleaf.engine.engine.synchronize", lost)
    progress = add_all(llm.engine)[VICTIM]
    llm.engine.step()
    plant(progress, "draw", monkeypatch)
    with pytest.raises(RuntimeError, match="illegal"):
        while llm.engine.has_work:
            llm.engine.step()


def test_the_heir_of_a_document_computes_it_after_a_fault(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(checkpoint(), max_num_batched_tokens=16, max_num_seqs=4)
    requests = add_all(llm.engine)
    for _ in range(3):
        llm.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", raise_planted)
        ended = llm.engine.step()
    llm.engine.check()
    assert 0 < len(ended) < len(requests)
    finish(llm)
    alive = [p for p in requests if p not in ended]
    assert all(len(p.output().token_ids) == 8 for p in alive)


def test_generate_raises_the_errors_of_its_own_requests_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = llm.engine.prompts.from_parts(PROMPTS[0])
    stranger = llm.engine.add(Request("stranger", parts, drawn(1)))
    monkeypatch.setattr(stranger.outputs[0].sampling, "draw", raise_planted)
    (output,) = llm.generate([PROMPTS[1]], drawn(2))
    assert output.finished
    assert isinstance(stranger.error, EngineFault)
    late = llm.engine.add(Request("late", parts, SamplingParams(max_tokens=40, ignore_eos=True)))
    llm.generate([PROMPTS[1]], drawn(2))
    assert not late.finished
    monkeypatch.setattr(SamplingState, "draw", raise_planted)
    with pytest.raises(EngineFault, match="planted"):
        llm.generate([PROMPTS[1]], drawn(2))
    assert llm.engine.knows("late") == (late.error is None)
    llm.engine.abort("late")
    assert_idle(llm)


def run(checkpoint: Folder, scenario: Callable[[AsyncLLM], Any]) -> AsyncLLM:
    async def limited() -> AsyncLLM:
        llm = AsyncLLM(checkpoint(), dtype="float32", num_pages=96)
        try:
            async with asyncio.timeout(30):
                await scenario(llm)
        finally:
            await asyncio.to_thread(llm.close)
        return llm

    return asyncio.run(limited())


async def last(stream: Any) -> Any:
    return [output async for output in stream][-1]


def test_books_that_do_not_balance_end_everything_and_close_the_engine(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        def unbalanced(*_: object) -> None:
            raise IntegrityError("planted")

        endless = SamplingParams(max_tokens=150, ignore_eos=True)
        streams = [llm.generate(prompt, endless) for prompt in PROMPTS]
        for stream in streams:
            await anext(stream)
        registration = llm.register(document(9, 30))
        await anext(registration)
        monkeypatch.setattr(llm.engine._scheduler, "schedule", raise_planted)
        monkeypatch.setattr(llm.engine._scheduler, "remove", unbalanced)
        ends = await asyncio.gather(*map(last, streams), return_exceptions=True)
        assert all(isinstance(end, EngineFault) for end in ends)
        assert not llm.is_open
        with pytest.raises(EngineClosed, match="broke"):
            await last(llm.generate(PROMPTS[0]))
        with pytest.raises((EngineClosed, EngineFault)):
            await last(registration)

    run(checkpoint, scenario)


def test_requests_that_a_broken_engine_ends_are_counted_as_failed(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        endless = SamplingParams(max_tokens=150, ignore_eos=True)
        streams = [llm.generate(prompt, endless) for prompt in PROMPTS]
        for stream in streams:
            await anext(stream)
        monkeypatch.setattr(llm.engine, "step", raise_planted)
        ends = await asyncio.gather(*map(last, streams), return_exceptions=True)
        assert all(isinstance(end, EngineFault) for end in ends)
        await asyncio.to_thread(llm.close)
        counters = llm.snapshot().counters
        assert (counters.failed, counters.aborted) == (len(PROMPTS), 0)

    run(checkpoint, scenario)


def test_an_engine_that_can_not_be_looked_at_leaves_nobody_waiting(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPTS[0], SamplingParams(max_tokens=150, ignore_eos=True))
        await anext(stream)
        monkeypatch.setattr(llm.engine, "snapshot", raise_planted)
        with pytest.raises(EngineFault, match="broke"):
            await last(stream)
        assert not llm.is_open

    run(checkpoint, scenario)


def test_a_failing_listener_of_steps_harms_nobody(
    checkpoint: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        reports = []

        def listen(stats: Any) -> None:
            reports.append(stats)
            raise Planted("planted")

        async with AsyncLLM(checkpoint(), on_step=listen, num_pages=96) as llm:
            output = await last(llm.generate(PROMPTS[0], drawn(1)))
        assert len(output.token_ids) == 6
        assert sum(stats.prompt_tokens for stats in reports) == len(output.prompt_token_ids)
        assert sum(stats.decode_rows for stats in reports) == 5

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert "planted" in caplog.text
