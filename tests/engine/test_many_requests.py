"""Sixty-four requests over ten documents, some cancelled, in a pool that holds half of them."""

import asyncio
import random

import pytest

from looseleaf import AsyncLLM, SamplingParams
from looseleaf.engine.progress import RequestProgress
from looseleaf.prompt.request import Prompt, Request
from tests.engine.harness import Folder, assert_idle, document, drawn, make_llm, words

NUM_REQUESTS, NUM_DOCUMENTS = 64, 10
LEAD = words(1, 21)
DOCUMENTS = [document(n, 40 + 7 * n) for n in range(NUM_DOCUMENTS)]
# a page holds 16 tokens; a document ends with two tokens of its own, and few merge into one
HALF_OF_THE_DOCUMENTS = sum(-(-(len(d.text) + 2) // 16) for d in DOCUMENTS) // 2
OPTIONS = {"num_pages": HALF_OF_THE_DOCUMENTS, "max_num_batched_tokens": 128, "max_num_seqs": 64}


def prompt(number: int) -> Prompt:
    """Two documents, the popular ones more often, in any order."""
    drawn_documents = random.Random(number).choices(
        DOCUMENTS, weights=[1 / (1 + n) for n in range(NUM_DOCUMENTS)], k=2
    )
    return [LEAD, *drawn_documents, words(100 + number, 5 + number % 20)]


PROMPTS = [prompt(number) for number in range(NUM_REQUESTS)]
PARAMS: list[SamplingParams] = [
    drawn(number, max_tokens=2 + number % 11) for number in range(NUM_REQUESTS)
]


@pytest.fixture(scope="module")
def expected(checkpoint: Folder) -> list[tuple[int, ...]]:
    """What each request is answered alone, in an engine that forgets everything in between."""
    llm = make_llm(checkpoint(), num_pages=64)
    answers = []
    for one, params in zip(PROMPTS, PARAMS, strict=True):
        llm.engine.store.evict_idle()
        answers.append(llm.generate([one], params)[0].token_ids)
    return answers


@pytest.mark.parametrize("seed", range(2))
def test_all_finish_or_are_cancelled_and_no_page_is_lost(
    checkpoint: Folder, expected: list[tuple[int, ...]], seed: int
) -> None:
    llm, rng = make_llm(checkpoint(), **OPTIONS), random.Random(seed)
    engine = llm.engine
    waiting = [
        Request(str(n), engine.prompts.from_parts(PROMPTS[n]), PARAMS[n])
        for n in range(NUM_REQUESTS)
    ]
    rng.shuffle(waiting)
    # most arrive at once, the others while those run
    added = [engine.add(waiting.pop()) for _ in range(48)]
    cancelled: set[str] = set()
    while engine.has_work or waiting:
        if waiting:
            added.append(engine.add(waiting.pop()))
        if rng.random() < 0.2:
            alive = [p.request.request_id for p in added if not p.finished]
            cancelled |= set(rng.sample(alive, min(1, len(alive))))
            for name in cancelled:
                engine.abort(name)
            engine.check()
        engine.step()
        engine.check()
    assert_idle(llm)
    assert_ends(added, cancelled, expected)
    assert engine.store.counters.evicted_segments > 0


def assert_ends(
    added: list[RequestProgress], cancelled: set[str], expected: list[tuple[int, ...]]
) -> None:
    """Whole answers for those who stayed, the beginning of one for those who left."""
    assert len(added) == NUM_REQUESTS
    assert 4 < len(cancelled) < NUM_REQUESTS // 2
    for progress in added:
        output, name = progress.output(), progress.request.request_id
        assert output.finished
        whole = expected[int(name)]
        if output.outputs[0].finish_reason == "abort":
            assert name in cancelled
            assert output.token_ids == whole[: len(output.token_ids)]
        else:
            assert output.token_ids == whole


def test_concurrent_tasks_finish_or_are_cancelled_and_no_page_is_lost(
    checkpoint: Folder, expected: list[tuple[int, ...]]
) -> None:
    rng = random.Random(7)
    leavers = set(rng.sample(range(NUM_REQUESTS), 16))

    async def one(llm: AsyncLLM, number: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        async for output in llm.generate(PROMPTS[number], PARAMS[number]):
            tokens = output.token_ids
            if number in leavers and len(tokens) > number % 3:
                return tokens
        return tokens

    async def everybody(llm: AsyncLLM) -> None:
        async with asyncio.timeout(120):
            tasks = [asyncio.create_task(one(llm, n)) for n in range(NUM_REQUESTS)]
            for number in sorted(leavers)[::2]:
                await asyncio.wait([tasks[number - 1 if number else 1]])
                tasks[number].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for number, result in enumerate(results):
            if isinstance(result, BaseException):
                assert isinstance(result, asyncio.CancelledError)
                assert number in leavers
            elif number in leavers:
                assert result == expected[number][: len(result)]
            else:
                assert result == expected[number]

    llm = AsyncLLM(checkpoint(), dtype="float32", device="cpu", **OPTIONS)
    try:
        asyncio.run(everybody(llm))
    finally:
        llm.close()
    llm.engine.check()
    assert llm.engine.store.num_available == llm.engine.store.pool.num_pages
