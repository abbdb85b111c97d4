"""One rank's view of all ranks: its share, its collectives and its messages."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from torch import Tensor
from torch.nn import functional

from looseleaf.errors import EngineFault
from looseleaf.parallel.collectives import Collectives
from looseleaf.parallel.link import Link
from looseleaf.parallel.processes import RankProcesses
from looseleaf.parallel.shard import Shard

# time limit of `Ranks.close` for a loss that another thread handles
_LOSE_SECONDS = 15.0

ALONE = contextlib.nullcontext()
"""A command of an engine with one rank, as `Link.command`."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Ranks:
    """Rank ``shard.rank`` among ``shard.size`` ranks."""

    shard: Shard
    collectives: Collectives
    link: Link
    processes: RankProcesses | None = None
    _lost: Event = field(default_factory=Event)
    _ended: Event = field(default_factory=Event)

    def sum(self, part: Tensor) -> Tensor:
        """The sum over ranks of a product that is split along its inner dim."""
        return self.collectives.sum(part)

    def largest(self, part: Tensor) -> Tensor:
        """The elementwise maximum over ranks, such as of scores over heads."""
        return self.collectives.largest(part)

    def lose(self) -> None:
        """End calls that wait for a rank that has ended, from any thread."""
        # first, because results are wrong from then on
        self._lost.set()
        try:
            self.collectives.close()
        finally:
            self._ended.set()

    def require_all(self) -> None:
        """Raise EngineFault if a rank has ended, so results may be wrong."""
        if self._lost.is_set():
            raise EngineFault("a rank of the engine has ended: start a new engine")

    def dismiss(self) -> None:
        """Let the other ranks end; nothing may be sent afterwards."""
        self.link.close()

    def close(self) -> None:
        """Wait for the end of the other ranks, after `dismiss`."""
        if self.processes is not None:
            self.processes.close()
        if self._lost.is_set():
            self._ended.wait(_LOSE_SECONDS)
        else:
            self.collectives.close()

    def vocabulary(self, part: Tensor, total: int) -> Tensor:
        """Scores ``[rows, total]`` of all tokens from this rank's scores ``[rows, tokens]``."""
        missing = self.shard.largest_vocabulary(total) - part.shape[1]
        padded = functional.pad(part, (0, missing)) if missing else part
        return self.collectives.gather(padded).transpose(0, 1).flatten(1)[:, :total].contiguous()


@runtime_checkable
class HasRanks(Protocol):
    """An object with methods that all ranks call."""

    @property
    def ranks(self) -> Ranks | None:
        """The ranks of the engine; None if it has one."""
        ...


Self = TypeVar("Self", bound=HasRanks)


def command(
    path: str,
) -> Callable[[Callable[Concatenate[Self, P], T]], Callable[Concatenate[Self, P], T]]:
    """Decorate the engine's method ``path``, such as ``documents.pin``: all ranks call it.

    Arguments are sent by pickle."""

    def decorate(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
        @functools.wraps(method)
        def call(self: Self, *arguments: P.args, **options: P.kwargs) -> T:
            ranks = self.ranks
            if ranks is None:
                return method(self, *arguments, **options)
            with ranks.link.command(path, *arguments, **options):
                return method(self, *arguments, **options)

        return cast(Callable[Concatenate[Self, P], T], call)

    return decorate
