"""Scores of continuations: their log-probabilities after a prompt, without generation."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from looseleaf.config import Fuse, FuseSelector
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.errors import EngineFault, InvalidRequest
from looseleaf.prompt.builder import PromptBuilder
from looseleaf.prompt.request import Document, Prompt, Request, with_policies
from looseleaf.sampling_params import SamplingParams


@dataclass(frozen=True)
class Score:
    """The log-probabilities of a continuation's tokens, natural logarithms.

    ``is_greedy`` is whether each token is the likeliest one after those before it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation."""
        return sum(self.logprobs)


class ScoreOptions(TypedDict, total=False):
    """Options of all requests of a call of `score`."""

    salt: str
    deadline: float | None
    fuse: Fuse | FuseSelector | None


def score_requests(
    builder: PromptBuilder,
    prompts: str | Iterable[Prompt],
    continuations: str | Iterable[str | Sequence[int]],
    next_id: Callable[[], str],
    options: ScoreOptions | None = None,
) -> list[Request]:
    """The requests of `LLM.score`, each with the continuation at its prompt's end.

    Raises InvalidRequest."""
    starts = [prompts] if isinstance(prompts, str) else [*prompts]
    texts = [continuations] if isinstance(continuations, str) else [*continuations]
    if any(isinstance(start, Document | int) for start in starts):
        raise InvalidRequest(
            "score takes a list of prompts: put the parts of one prompt into a list of their own, "
            "as in llm.score([[document, 'question']], 'answer')"
        )
    if any(isinstance(text, int) for text in texts):
        raise InvalidRequest(
            "score takes a list of continuations: put the token ids of one into a list of their own"
        )
    if len(starts) == 1:
        starts *= len(texts)
    if len(starts) != len(texts):
        raise InvalidRequest(
            f"{len(starts)} prompts but {len(texts)} continuations: give one prompt or as many"
        )
    requests = []
    for start, text in zip(starts, texts, strict=True):
        prompt = builder.from_parts(start)
        parts, ids = builder.continued(prompt, text)
        first = sum(len(part.tokens) for part in prompt)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=first)
        requests.append(Request(next_id(), parts, params, num_given=len(ids)))
    chosen = options or {}
    salt, deadline, fuse = chosen.get("salt", ""), chosen.get("deadline"), chosen.get("fuse")
    return [
        with_policies(replace(request, salt=salt, deadline=deadline), fuse=fuse)
        for request in requests
    ]


def score_of(output: RequestOutput, num_given: int) -> Score:
    """The score of the last ``num_given`` tokens of a scored prompt.

    Raises EngineFault if the engine has lost a score."""
    entries = [entry for entry in (output.prompt_logprobs or ())[-num_given:] if entry]
    if len(entries) != num_given:
        raise EngineFault("the engine has lost scores of a prompt: ask again")
    return Score(
        tuple(entry[0].token_id for entry in entries),
        tuple(entry[0].logprob for entry in entries),
        all(entry[0].rank == 1 for entry in entries),
    )


async def gather_scores(
    stream: Callable[[Request], AsyncGenerator[RequestOutput, None]], requests: Sequence[Request]
) -> list[Score]:
    """The scores of requests that run together, in order; an error ends all of them."""

    async def score(request: Request) -> Score:
        outputs = [output async for output in stream(request)]
        return score_of(outputs[-1], request.num_given)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(score(request)) for request in requests]
    return [task.result() for task in tasks]
