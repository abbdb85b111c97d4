"""One API request in the engine: its prompts run concurrently, and their outputs are merged."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from looseleaf.llm.client import Output
from looseleaf.prompt.request import Policies, Request
from looseleaf.sampling_params import SamplingParams
from looseleaf.server import report
from looseleaf.server.connection import cancel
from looseleaf.server.errors import ApiError
from looseleaf.server.keys import Caller
from looseleaf.server.prompts import TokenizedPrompt
from looseleaf.server.service import Service

Update = tuple[int, Output]
"""The index of a prompt, and its output so far."""


@dataclass(eq=False)
class Generation:
    """The prompts of one API request; ``outputs`` has the latest output of each prompt.

    ``shortens`` lowers ``max_tokens`` to the room that the context leaves."""

    service: Service
    request_id: str
    caller: Caller
    prompts: Sequence[TokenizedPrompt]
    params: SamplingParams
    deadline: float
    policies: Policies
    shortens: bool = False
    outputs: list[Output | None] = field(init=False)
    _finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.outputs = [None] * len(self.prompts)
        self._check_sizes()

    @property
    def latest(self) -> list[Output]:
        """The outputs so far, without prompts that have none yet."""
        return [output for output in self.outputs if output is not None]

    @property
    def finished(self) -> bool:
        """Whether every prompt has finished, as far as the updates have said."""
        return len(self._finished) == len(self.prompts)

    @property
    def reuse_header(self) -> str:
        """The counts of reused tokens so far, as the value of a header."""
        return report.reuse_header(report.reuse_counts(self.latest, self.prompts))

    def reuse_report(self) -> dict[str, Any]:
        """The reuse of the outputs so far, as the ``looseleaf`` object of an answer."""
        return report.reuse(self.latest, self.prompts)

    async def complete(self) -> list[Output]:
        """The final outputs of all prompts."""
        updates = self.updates()
        async with aclosing(updates):
            async for _ in updates:
                pass
        return self.latest

    async def updates(self) -> AsyncGenerator[Update, None]:
        """Outputs as they grow; closing the generator aborts all prompts.

        Raises ApiError (429) if the queue is full, and the engine's errors."""
        with self.service.queue.reserve(len(self.prompts) * self.params.n):
            updates = self._single() if len(self.prompts) == 1 else self._merged()
            async with aclosing(updates):
                async for number, output in updates:
                    self.outputs[number] = output
                    # an output may grow between two updates, so its end may be seen twice
                    if output.finished and number not in self._finished:
                        self._finished.add(number)
                        self.service.metrics.on_finish(output)
                    yield number, output

    async def _single(self) -> AsyncGenerator[Update, None]:
        stream = self._stream(0)
        async with aclosing(stream):  # type: ignore[type-var]
            async for output in stream:
                yield 0, output

    async def _merged(self) -> AsyncGenerator[Update, None]:
        # one slot: streams wait for a slow reader, then yield their newest output only
        updates: asyncio.Queue[Update | Exception | None] = asyncio.Queue(maxsize=1)

        async def forward(number: int) -> None:
            try:
                # cancellation while the queue is full does not reach the stream
                async with aclosing(self._stream(number)) as stream:  # type: ignore[type-var]
                    async for output in stream:
                        await updates.put((number, output))
                await updates.put(None)
            except Exception as error:
                await updates.put(error)

        tasks = [asyncio.create_task(forward(n)) for n in range(len(self.prompts))]
        try:
            num_running = len(tasks)
            while num_running:
                update = await updates.get()
                if isinstance(update, Exception):
                    raise update
                if update is None:
                    num_running -= 1
                else:
                    yield update
        finally:
            await cancel(*tasks)

    def _stream(self, number: int) -> AsyncIterator[Output]:
        prompt = self.prompts[number]
        request = Request(
            self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{number}",
            prompt.parts,
            replace(self.params, max_tokens=self._max_tokens(prompt)),
            self.caller.salt,
            self.deadline,
            **self.policies,
        )
        return self.service.llm.stream(request)

    def _max_tokens(self, prompt: TokenizedPrompt) -> int | None:
        limit, max_total = self.params.max_tokens, self.service.config.max_request_tokens
        if limit is None and max_total is None:
            # the engine stops at the end of the context
            return None
        if limit is not None and not self.shortens:
            return limit
        context = self.service.llm.facts.max_model_len
        room = (context if max_total is None else min(context, max_total)) - prompt.num_tokens
        return max(1, self.params.min_tokens, room if limit is None else min(limit, room))

    def _check_sizes(self) -> None:
        config, context = self.service.config, self.service.llm.facts.max_model_len
        outputs = len(self.prompts) * self.params.n
        if outputs > config.max_completions:
            raise ApiError(
                400,
                f"the request has {outputs} outputs, above the limit of "
                f"{config.max_completions}: lower n, or send fewer prompts",
                param="n",
                code="too_many_outputs",
            )
        for prompt in self.prompts:
            max_tokens = self._max_tokens(prompt)
            total = prompt.num_tokens + (1 if max_tokens is None else max_tokens)
            if total > context:
                answer = "at least 1" if self.params.max_tokens is None else str(max_tokens)
                raise ApiError(
                    400,
                    f"the prompt has {prompt.num_tokens} tokens and its answer {answer}, {total} "
                    f"in all, but the context holds {context}: shorten the documents or the text, "
                    "or lower max_tokens",
                    code="context_length_exceeded",
                )
            max_total = config.max_request_tokens
            if max_total is not None and total > max_total:
                raise ApiError(
                    400,
                    f"the prompt has {prompt.num_tokens} tokens and its answer may have "
                    f"{max_tokens}, but a request may have {max_total} in all: shorten it, "
                    "or set max_tokens",
                    code="too_many_tokens",
                )
