"""One API request on its way through the engine: its prompts side by side, and their outputs."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.prompt.request import Policies, Request
from looseleaf.sampling_params import SamplingParams
from looseleaf.server.connection import cancel
from looseleaf.server.errors import ApiError
from looseleaf.server.keys import Caller
from looseleaf.server.prompts import MadePrompt
from looseleaf.server.service import Service

Update = tuple[int, RequestOutput]
"""The number of a prompt, and its output so far."""


@dataclass(eq=False)
class Generation:
    """The prompts of one API request. ``outputs`` has the latest state of each; one that
    ``shortens`` has answers of fewer tokens than ``params`` says where more do not fit, and one
    without a limit of its own ends where the server's limit does."""

    service: Service
    request_id: str
    caller: Caller
    prompts: Sequence[MadePrompt]
    params: SamplingParams
    deadline: float
    policies: Policies
    shortens: bool = False
    outputs: list[RequestOutput | None] = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = [None] * len(self.prompts)
        self._check_sizes()

    @property
    def latest(self) -> list[RequestOutput]:
        """The outputs of those prompts that have any."""
        return [output for output in self.outputs if output is not None]

    @property
    def finished(self) -> bool:
        """Whether every prompt has its whole output."""
        return all(output is not None and output.finished for output in self.outputs)

    async def updates(self) -> AsyncGenerator[Update, None]:
        """Outputs as they grow; leaving the loop aborts them all.

        Raises ApiError (429) if the queue is full, and what the engine raises."""
        with self.service.queue.places(len(self.prompts) * self.params.n):
            source = self._alone() if len(self.prompts) == 1 else self._together()
            async with aclosing(source):
                async for number, output in source:
                    self.outputs[number] = output
                    if output.finished:
                        self.service.metrics.on_finish(output)
                    yield number, output

    async def _alone(self) -> AsyncGenerator[Update, None]:
        stream = self._stream(0)
        async with aclosing(stream):  # type: ignore[type-var]
            async for output in stream:
                yield 0, output

    async def _together(self) -> AsyncGenerator[Update, None]:
        # one place: behind a caller that reads slowly streams wait, and then tell the newest only
        arrived: asyncio.Queue[Update | Exception] = asyncio.Queue(maxsize=1)

        async def follow(number: int) -> None:
            try:
                # closed here: it may be cancelled outside of the stream, waiting for a place
                async with aclosing(self._stream(number)) as stream:  # type: ignore[type-var]
                    async for output in stream:
                        await arrived.put((number, output))
            except Exception as error:
                await arrived.put(error)

        tasks = [asyncio.create_task(follow(n)) for n in range(len(self.prompts))]
        try:
            left = len(tasks)
            while left:
                update = await arrived.get()
                if isinstance(update, Exception):
                    raise update
                left -= update[1].finished
                yield update
        finally:
            await cancel(*tasks)

    def _stream(self, number: int) -> AsyncIterator[RequestOutput]:
        name = self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{number}"
        params = replace(self.params, max_tokens=self._limit(self.prompts[number]))
        parts = self.prompts[number].parts
        about = name, parts, params, self.caller.salt, self.deadline
        return self.service.llm.stream(Request(*about, **self.policies))

    def _limit(self, prompt: MadePrompt) -> int | None:
        """Most tokens of the answers to a prompt."""
        limit, most = self.params.max_tokens, self.service.config.max_request_tokens
        if limit is None and most is None:
            # the engine goes on to the end of the context
            return None
        if limit is not None and not self.shortens:
            return limit
        context = self.service.llm.engine.max_model_len
        room = (context if most is None else min(context, most)) - prompt.num_tokens
        return max(1, self.params.min_tokens, room if limit is None else min(limit, room))

    def _check_sizes(self) -> None:
        config, context = self.service.config, self.service.llm.engine.max_model_len
        outputs = len(self.prompts) * self.params.n
        if outputs > config.max_completions:
            raise ApiError(
                400,
                f"the request asks for {outputs} outputs, but {config.max_completions} are the "
                "most: lower n, or send fewer prompts",
                param="n",
                code="too_many_outputs",
            )
        for prompt in self.prompts:
            answer = self._limit(prompt)
            total = prompt.num_tokens + (answer or 1)
            if total > context:
                wanted = "at least 1" if self.params.max_tokens is None else str(answer)
                raise ApiError(
                    400,
                    f"the prompt has {prompt.num_tokens} tokens and its answer {wanted}, {total} "
                    f"in all, but the context holds {context}: shorten the documents or the text, "
                    "or lower max_tokens",
                    code="context_length_exceeded",
                )
            most = config.max_request_tokens
            if most is not None and total > most:
                raise ApiError(
                    400,
                    f"the prompt has {prompt.num_tokens} tokens and its answer may have "
                    f"{answer}, but a request may have {most} in all: shorten it, "
                    "or set max_tokens",
                    code="too_many_tokens",
                )
