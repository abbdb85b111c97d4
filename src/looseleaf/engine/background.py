"""Work that an engine does between steps, such as hosting documents. Work is listed from its first
job to its last, so a step without any asks nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@runtime_checkable
class Background(Protocol):
    """One kind of work between steps."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether no job is left."""
        ...

    def step(self) -> None:
        """Go on with the oldest job."""
        ...


Enlist = Callable[[Background], None]


@dataclass(eq=False)
class BackgroundWork:
    """All ``works`` that have jobs."""

    works: list[Background] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return any(work.has_work for work in self.works)

    def enlist(self, work: Background) -> None:
        """Have ``work`` go on before every step until it is done."""
        if work not in self.works:
            self.works.append(work)

    def step(self) -> None:
        """Go on with every kind of work."""
        for work in self.works:
            work.step()
        self.works = [work for work in self.works if not work.is_done]
