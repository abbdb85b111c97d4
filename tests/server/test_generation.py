"""The prompts of one request beside each other: what waits for a slow caller, and who goes away."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.prompt.request import Request
from looseleaf.sampling_params import SamplingParams
from looseleaf.server.generation import Generation
from looseleaf.server.keys import OPEN_CALLER
from tests.server.live import QUESTION, Live

PROMPTS, TOKENS = 4, 200


class Streams:
    """Counts what a service's streams hand over, and how many are open."""

    def __init__(self, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handed = self.open = 0
        stream = live.service.llm.stream

        async def counted(request: Request) -> AsyncIterator[RequestOutput]:
            self.open += 1
            try:
                async with aclosing(stream(request)) as outputs:
                    async for output in outputs:
                        self.handed += 1
                        yield output
            finally:
                self.open -= 1

        monkeypatch.setattr(live.service.llm, "stream", counted)


@pytest.fixture
def streams(live: Live, monkeypatch: pytest.MonkeyPatch) -> Streams:
    live.wait_until_idle()
    return Streams(live, monkeypatch)


def generation(live: Live, name: str) -> Generation:
    """Several prompts with long answers."""
    made = live.service.prompts(OPEN_CALLER).completion(QUESTION, [])
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return Generation(live.service, name, OPEN_CALLER, [made] * PROMPTS, params, 60.0, {})


async def engine_is_idle(live: Live) -> None:
    """Returns when everything has been computed, whoever has read it."""
    async with asyncio.timeout(60):
        await live.service.llm._calls.watch(lambda: not live.service.llm.engine.has_work or None)
    # what was told meanwhile arrives
    for _ in range(100):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_no_more_than_the_newest_waits_for_a_slow_caller(live: Live, streams: Streams) -> None:
    async def read_slowly() -> None:
        asked = generation(live, "slow")
        async with aclosing(asked.updates()) as updates:
            await anext(updates)
            await engine_is_idle(live)
            assert streams.handed <= 2 * PROMPTS, "what nobody reads must not pile up"
            async for _ in updates:
                pass
        assert [len(one.outputs[0].token_ids) for one in asked.latest] == [TOKENS] * PROMPTS

    run(read_slowly)
    assert streams.open == 0
    live.wait_until_idle()


def test_a_caller_who_goes_away_while_outputs_wait_ends_them_all(
    live: Live, streams: Streams
) -> None:
    aborted = live.now().counters.aborted

    async def go_away() -> None:
        async with aclosing(generation(live, "gone").updates()) as updates:
            await anext(updates)
            # all of them have something to say and no place for it
            while streams.handed < PROMPTS:
                await asyncio.sleep(0)
        assert streams.open == 0, "who has gone leaves no stream behind"
        assert live.service.queue.reserved == 0

    run(go_away)
    live.wait_until_idle()
    assert live.now().counters.aborted == aborted + PROMPTS


def test_an_error_of_one_prompt_is_told_though_others_wait(
    live: Live, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = live.service.llm.stream

    def fails(request: Request) -> AsyncIterator[RequestOutput]:
        async def none() -> AsyncIterator[RequestOutput]:
            raise RuntimeError("broken")
            yield

        return none() if request.request_id == "one-2" else told(request)

    monkeypatch.setattr(live.service.llm, "stream", fails)

    async def read() -> None:
        with pytest.raises(RuntimeError, match="broken"):
            async with aclosing(generation(live, "one").updates()) as updates:
                async for _ in updates:
                    pass

    run(read)
    assert streams.open == 0
    live.wait_until_idle()
