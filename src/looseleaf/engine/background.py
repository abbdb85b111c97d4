"""Background work of an engine between steps, such as the prefill of host-resident documents.

A kind of work is listed only while it has jobs, so a step without jobs costs nothing."""

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
        """Whether all jobs have ended."""
        ...

    def step(self) -> None:
        """Continue the oldest job."""
        ...


Enlist = Callable[[Background], None]


@dataclass(eq=False)
class BackgroundWork:
    """All kinds of work that have jobs."""

    works: list[Background] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return any(work.has_work for work in self.works)

    def enlist(self, work: Background) -> None:
        """Run ``work`` before every step until its jobs have ended."""
        if work not in self.works:
            self.works.append(work)

    def step(self) -> None:
        """Continue every kind of work."""
        for work in self.works:
            work.step()
        self.works = [work for work in self.works if not work.is_done]
