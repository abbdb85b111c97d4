"""Many callers at once: each hears its own answer, and whoever leaves takes nothing along."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from looseleaf import AsyncLLM, SamplingParams
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.runner.runner import Runner
from looseleaf.engine.sampling.sampler import Sampler
from looseleaf.engine.scheduler import Scheduler
from looseleaf.errors import (
    EngineFault,
    InvalidOption,
    InvalidRequest,
    LooseleafError,
    PromptTooLong,
)
from looseleaf.prompt.request import Prompt
from tests.engine.harness import Folder, document, drawn, make_llm, words

PATIENCE = 30.0
LEAD, A, B = words(1, 19), document(1, 40), document(2, 18)
PROMPTS: list[Prompt] = [[LEAD, A, B, words(10 + n, 4 + n)] for n in range(12)]
PARAMS = [drawn(n, max_tokens=10) for n in range(12)]


@contextmanager
def engine(checkpoint: Folder, **options: Any) -> Iterator[AsyncLLM]:
    options = {"dtype": "float32", "device": "cpu", "num_pages": 96, **options}
    llm = AsyncLLM(checkpoint(), **options)
    try:
        yield llm
    finally:
        llm.close()
        assert not llm.is_open
        llm.engine.check()
        assert not llm.engine.has_work
        assert llm.engine.store.num_available == llm.engine.store.pool.num_pages


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Runs a scenario; one that waits for something that never comes is a failure."""

    async def limited() -> None:
        async with asyncio.timeout(PATIENCE):
            await work()

    asyncio.run(limited())


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


@pytest.mark.usefixtures("unchecked")
def test_a_keyword_that_there_is_not_is_explained(checkpoint: Folder) -> None:
    turns = [{"role": "user", "content": "who?"}]
    wrong: dict[str, Any] = {"temperature": 0}
    with engine(checkpoint) as llm:
        with pytest.raises(InvalidOption, match="generate has no option 'temperature'"):
            llm.generate("who?", **wrong)
        with pytest.raises(InvalidOption, match="chat has no option 'temperature'"):
            llm.chat(turns, **wrong)
        with pytest.raises(InvalidOption, match="not a dict"):
            llm.chat(turns, {})  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
def test_a_stream_of_what_is_no_request_says_what_takes_it(checkpoint: Folder) -> None:
    prompt: Any = "who?"
    with engine(checkpoint) as llm:

        async def ask() -> None:
            with pytest.raises(InvalidRequest, match="`generate`"):
                await anext(llm.stream(prompt))

        run(ask)


def test_concurrent_answers_are_those_of_one_at_a_time(checkpoint: Folder) -> None:
    outputs: list[RequestOutput] = []

    async def ask_all(llm: AsyncLLM) -> None:
        streams = [llm.generate(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
        outputs.extend(await asyncio.gather(*map(last, streams)))

    with engine(checkpoint) as llm:
        run(lambda: ask_all(llm))
        assert llm.engine.counters.documents_computed == 2
    offline = make_llm(checkpoint())
    for output, prompt, params in zip(outputs, PROMPTS, PARAMS, strict=True):
        assert output.finished
        (expected,) = offline.generate([prompt], params)
        assert (output.token_ids, output.text) == (expected.token_ids, expected.text)


def test_a_stream_only_grows_and_ends_finished(checkpoint: Folder) -> None:
    async def listen(llm: AsyncLLM) -> None:
        before: tuple[int, ...] = ()
        async for output in llm.generate(PROMPTS[0], PARAMS[0]):
            assert output.token_ids[: len(before)] == before
            before = output.token_ids
        assert output.finished
        assert len(before) == 10

    with engine(checkpoint) as llm:
        run(lambda: listen(llm))


def test_chat_streams_the_answer_to_a_conversation(checkpoint: Folder) -> None:
    messages = [{"role": "user", "content": [A, "Who?"]}]

    async def talk(llm: AsyncLLM) -> None:
        output = await last(llm.chat(messages, PARAMS[0]))
        assert [d.name for d in output.reuse.documents] == ["d1"]

    with engine(checkpoint) as llm:
        run(lambda: talk(llm))


def test_cancelled_tasks_and_streams_left_early_free_their_pages(checkpoint: Folder) -> None:
    endless = SamplingParams(max_tokens=150, ignore_eos=True)

    async def scenario(llm: AsyncLLM) -> None:
        doomed = [asyncio.create_task(last(llm.generate(p, endless))) for p in PROMPTS[:6]]
        left = llm.generate(PROMPTS[6], endless)
        async for output in left:
            if len(output.token_ids) == 3:
                break
        await left.aclose()
        for task in doomed:
            task.cancel()
        results = await asyncio.gather(*doomed, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        output = await last(llm.generate(PROMPTS[7], PARAMS[7]))
        assert len(output.token_ids) == 10
        # commands run in order: by now the engine has heard of every cancellation
        assert not llm.engine.has_work

    with engine(checkpoint) as llm:
        run(lambda: scenario(llm))


def test_a_duplicate_id_is_refused_without_harm_to_the_first(checkpoint: Folder) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        first = llm.generate(PROMPTS[0], PARAMS[0], request_id="same")
        await anext(first)
        with pytest.raises(InvalidRequest, match="'same' is in use"):
            await last(llm.generate(PROMPTS[1], PARAMS[1], request_id="same"))
        assert len((await last(first)).token_ids) == 10
        again = await last(llm.generate(PROMPTS[1], PARAMS[1], request_id="same"))
        assert again.request_id == "same"

    with engine(checkpoint) as llm:
        run(lambda: scenario(llm))


def test_a_request_that_cannot_be_served_fails_alone(checkpoint: Folder) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        good = asyncio.create_task(last(llm.generate(PROMPTS[0], PARAMS[0])))
        with pytest.raises(PromptTooLong):
            await last(llm.generate(words(1, 400), PARAMS[0]))
        with pytest.raises(InvalidRequest, match="end with text"):
            llm.generate([LEAD, A])
        assert len((await good).token_ids) == 10

    with engine(checkpoint) as llm:
        run(lambda: scenario(llm))


def test_a_fault_in_the_engine_reaches_its_callers_and_later_ones_are_served(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(llm: AsyncLLM, name: str) -> None:
        tasks = [last(llm.generate(p, PARAMS[0])) for p in PROMPTS[:3]]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineFault) for result in results), name
        assert all(isinstance(r.__cause__, ZeroDivisionError) for r in results), name
        monkeypatch.undo()
        assert len((await last(llm.generate(PROMPTS[0], PARAMS[0]))).token_ids) == 10

    with engine(checkpoint) as llm:
        # in the model, in the sampler behind it, in the scheduler before it
        for kind, method in ((Runner, "run"), (Sampler, "sample"), (Scheduler, "schedule")):
            monkeypatch.setattr(kind, method, lambda *_: 1 / 0)
            run(lambda name=method: scenario(llm, name))  # type: ignore[misc]


def test_closing_ends_every_stream_and_refuses_new_ones(checkpoint: Folder) -> None:
    endless = SamplingParams(max_tokens=150, ignore_eos=True)

    async def scenario(llm: AsyncLLM) -> None:
        started = asyncio.Event()

        async def listen(prompt: Prompt) -> None:
            async for _ in llm.generate(prompt, endless):
                started.set()

        tasks = [asyncio.create_task(listen(prompt)) for prompt in PROMPTS]
        await started.wait()
        late = asyncio.create_task(last(llm.generate(PROMPTS[0], endless)))
        await asyncio.to_thread(llm.close)
        results = await asyncio.gather(*tasks, late, return_exceptions=True)
        assert all(isinstance(result, LooseleafError) for result in results)
        with pytest.raises(LooseleafError, match="closed"):
            await last(llm.generate(PROMPTS[0]))

    with engine(checkpoint) as llm:
        run(lambda: scenario(llm))
        llm.close()


def test_no_caller_waits_for_an_engine_that_closes_meanwhile(checkpoint: Folder) -> None:
    """A request that is put right behind the command to close must fail, not wait for ever."""

    async def scenario(llm: AsyncLLM) -> None:
        thread = threading.Thread(target=llm.close)
        stream = llm.generate(PROMPTS[0], PARAMS[0])
        await anext(stream)
        thread.start()
        results = await asyncio.gather(
            *(last(llm.generate(prompt, PARAMS[0])) for prompt in PROMPTS), return_exceptions=True
        )
        thread.join()
        assert all(isinstance(r, LooseleafError | RequestOutput) for r in results)

    for _ in range(3):
        with engine(checkpoint) as llm:
            run(lambda llm=llm: scenario(llm))  # type: ignore[misc]


def test_an_engine_outlives_the_event_loop_that_used_it(checkpoint: Folder) -> None:
    endless = SamplingParams(max_tokens=100, ignore_eos=True)

    async def walk_away(llm: AsyncLLM) -> None:
        for prompt in PROMPTS:
            await anext(llm.generate(prompt, endless))

    async def ask_again(llm: AsyncLLM) -> None:
        assert len((await last(llm.generate(PROMPTS[0], PARAMS[0]))).token_ids) == 10

    with engine(checkpoint) as llm:
        for _ in range(2):
            run(lambda: walk_away(llm))
            run(lambda: ask_again(llm))


def test_an_async_engine_is_a_context(checkpoint: Folder) -> None:
    async def scenario() -> None:
        async with AsyncLLM(checkpoint(), num_pages=32) as llm:
            assert (await last(llm.generate("who?", PARAMS[0]))).finished
        assert not llm.is_open

    run(scenario)
