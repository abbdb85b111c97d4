"""The canary: it repeats some blended requests by full prefill, and raises ratios if too many
answers differ.

Canary requests run in the background, one at a time, when no other request waits. They use the same
sampling parameters and seed, so different answers come from different distributions."""

from collections import deque
from collections.abc import Callable, Sized
from dataclasses import dataclass, field, replace

from looseleaf.blend.fuse_budget import multiplied
from looseleaf.config import EngineConfig
from looseleaf.engine.background import Enlist
from looseleaf.engine.progress import OutputProgress, RequestProgress
from looseleaf.engine.reports.stats import EngineCounters
from looseleaf.errors import LooseleafError
from looseleaf.prompt.request import Request, TextPart

WINDOW = 10
"""Answers per comparison with the bound."""

RAISE = 1.5
# upper bound of the factor: a ratio of one millionth then covers all tokens
_MOST = 1e6
_MOST_PENDING = 16


@dataclass(frozen=True)
class _Case:
    request: Request
    answer: tuple[int, ...]


@dataclass(eq=False)
class Canary:
    """The canary of one engine. ``factor`` multiplies ratios, token counts and times of blends.

    ``add`` adds a request to ``waiting``; ``enlist`` makes the engine call `step` between steps."""

    config: EngineConfig
    counters: EngineCounters
    add: Callable[[Request], object]
    waiting: Sized
    enlist: Enlist
    factor: float = 1.0
    _owed: float = 0.0
    _running: _Case | None = None
    _pending: deque[_Case] = field(default_factory=deque)
    _recent: list[bool] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        """Whether an answer waits for its check."""
        return bool(self._pending)

    @property
    def is_done(self) -> bool:
        """Whether no answer waits."""
        return not self._pending

    def adjusted(self, request: Request) -> Request:
        """The request with its budget multiplied by ``factor``."""
        if self.factor == 1.0 or request.fuse is None:
            return request
        return replace(request, fuse=multiplied(request.fuse, self.factor))

    def ended(self, progress: RequestProgress) -> None:
        """Record the end of a request: compare a canary, or queue a blended request's check."""
        if progress.request.canary:
            self._settle(progress)
        elif self._is_due(progress):
            self._pending.append(_Case(self._full_prefill(progress), progress.outputs[0].answer))
            self.enlist(self)

    def step(self) -> None:
        """Add the next canary request, if no request waits and no canary runs."""
        if self.waiting or self._running is not None or not self._pending:
            return
        self._running = self._pending.popleft()
        try:
            self.add(self._running.request)
        except LooseleafError:
            # as plain text the prompt may exceed the pool
            self._running = None

    def _is_due(self, progress: RequestProgress) -> bool:
        sequence = progress.outputs[0].sequence
        finish = progress.outputs[0].stop.finish
        if sequence.fuse_in_force is None or progress.error is not None or not finish:
            return False
        if finish.reason == "abort" or not sequence.draws:
            return False
        self._owed += self.config.canary_share
        if self._owed < 1.0 or len(self._pending) >= _MOST_PENDING:
            return False
        self._owed -= 1.0
        return True

    def _full_prefill(self, progress: RequestProgress) -> Request:
        request = progress.request
        seed = progress.seed if request.params.seed is None else request.params.seed
        return replace(
            request,
            request_id=f"(canary of {request.request_id})",
            parts=(TextPart(tuple(request.token_ids), opens_answer=request.opens_answer),),
            params=replace(request.params, n=1, seed=seed, logprobs=None, prompt_logprobs=None),
            deadline=None,
            fuse=None,
            canary=True,
            # no API process reads its text
            decodes=True,
        )

    def _settle(self, progress: RequestProgress) -> None:
        case, self._running = self._running, None
        if case is None or progress.error is not None:
            return
        agrees = _agrees(progress.outputs[0], case.answer)
        self.counters.canaries += 1
        self.counters.canaries_agreed += agrees
        self._recent.append(agrees)
        if len(self._recent) < WINDOW:
            return
        if sum(self._recent) < self.config.canary_bound * WINDOW:
            self.factor = min(self.factor * RAISE, _MOST)
            self.counters.canary_raises += 1
        self._recent.clear()


def _agrees(output: OutputProgress, answer: tuple[int, ...]) -> bool:
    """Whether ``output`` has the tokens of ``answer``, which may end later at a stop string.

    An API process finds a stop string some tokens after the engine has computed it."""
    finish, tokens = output.stop.finish, output.answer
    if finish is not None and isinstance(finish.stop, str):
        answer = answer[: len(tokens)]
    return tokens == answer
