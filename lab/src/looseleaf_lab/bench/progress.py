"""Progress of benchmarks: a header, the running step, and the time left.

A benchmark names its steps by `Progress.over`. Loops nest. The time left follows from the finished
share of all loops; steps of a loop count by their ``work``, by default equally."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")
_LEAST_SHARE, _LEAST_SECONDS = 0.0005, 2.0
_BETWEEN_LINES = 5.0


class Progress:
    """Reports nothing: the default for calls from Python."""

    def over(
        self,
        items: Iterable[Item],
        name: Callable[[Item], str] = str,
        work: Callable[[Item], float] = lambda item: 1.0,
    ) -> Iterator[Item]:
        """The items, each reported by its ``name`` before it is yielded.

        ``work`` is the item's part of the loop's time, in any unit."""
        yield from items

    def stage(self, name: str) -> None:
        """Reports a step outside of loops."""


SILENT = Progress()


@dataclass(eq=False)
class _Loop:
    """Work of a loop, of its finished steps, and of the running step."""

    total: float
    finished: float = 0.0
    running: float = 0.0


class ConsoleProgress(Progress):
    """Prints each step of the outermost loop, and an inner one after five silent seconds. A
    terminal shows a live line instead of the inner ones."""

    def __init__(self, console: "Console", clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._start = self._last = clock()
        self._loops: list[_Loop] = []
        self._live: Callable[[str], None] | None = None

    def header(self, title: str, facts: Mapping[str, object]) -> None:
        """Prints the title, and a line per fact."""
        self._print(title)
        for name, fact in facts.items():
            self._print(f"  {name}: {fact}")

    @contextmanager
    def live(self) -> Iterator[None]:
        """Keeps a line with the running step at the bottom of a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status("starting") as status:
            self._live = status.update
            try:
                yield
            finally:
                self._live = None

    def over(
        self,
        items: Iterable[Item],
        name: Callable[[Item], str] = str,
        work: Callable[[Item], float] = lambda item: 1.0,
    ) -> Iterator[Item]:
        item_list: Sequence[Item] = [*items]
        loop = _Loop(sum(map(work, item_list)))
        self._loops.append(loop)
        try:
            for number, item in enumerate(item_list, 1):
                loop.running = work(item)
                self._report(
                    f"{number} of {len(item_list)}: {name(item)}", inner=len(self._loops) > 1
                )
                yield item
                loop.finished += loop.running
        finally:
            self._loops.remove(loop)

    def stage(self, name: str) -> None:
        self._report(name, inner=False)

    def share(self) -> float:
        """The finished share of all loops, from 0 to 1."""
        share, scale = 0.0, 1.0
        for loop in self._loops:
            share += scale * loop.finished / (loop.total or 1.0)
            scale *= loop.running / (loop.total or 1.0)
        return share

    def _report(self, text: str, *, inner: bool) -> None:
        now = self._clock()
        line = f"{now - self._start:7.1f} s  {text}{self._time_left(now)}"
        if self._live is not None:
            self._live(line)
        if not inner or (self._live is None and now - self._last >= _BETWEEN_LINES):
            self._last = now
            self._print(line)

    def _time_left(self, now: float) -> str:
        share, elapsed = self.share(), now - self._start
        if share < _LEAST_SHARE or elapsed < _LEAST_SECONDS:
            return ""
        seconds = elapsed * (1 - share) / share
        text = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        if seconds > 2 * 3600:
            text = f"{seconds / 3600:.1f} h"
        return f" (about {text} left)"

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
