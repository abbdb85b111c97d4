"""The rows of one output's window (RetroAttention), whatever its newest row chooses from.

The newest row chooses what is read. It and the rows before it, as far as they are in the window,
are rows of the step like any other, each at its own position; their keys and values go where they
went before."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from typing import ClassVar

from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.config import Revise
from looseleaf.prompt.feature import Feature, FeatureSequence
from looseleaf.retro import Window, window_for


@dataclass(eq=False)
class Revision(Feature):
    """One output's window. ``free_rows`` is how many rows a step may have before an adaptive window
    falls; ``counts_keys`` whether `counts` are of keys, not of pages.
    """

    counts_keys: ClassVar[bool] = False
    revise: Revise
    page_size: int
    free_rows: int
    window: Window = field(default_factory=Window, kw_only=True)
    _trimmed: list[int] = field(default_factory=list, kw_only=True)

    def rows(
        self, sequence: FeatureSequence, rows: list[DecodeRow], num_outputs: int, num_new_rows: int
    ) -> list[DecodeRow]:
        """The rows of a step, the newest first: of ``rows``, the only one as it would be without
        revision.

        Where the newest row reads everything, or a window falls to one row, nothing is revised, and
        nothing kept."""
        [newest] = rows
        return self.window_rows(newest, self.width(num_outputs, num_new_rows))

    def window_rows(self, newest: DecodeRow, width: int) -> list[DecodeRow]:
        """``newest`` and the rows before it, at most ``width`` in all."""
        raise NotImplementedError

    def counts(self) -> list[int]:
        """What rows read at their own step and with some steps behind it, as far as counted."""
        raise NotImplementedError

    def restart(self) -> None:
        """Nothing is kept of the rows so far."""
        self.window.restart()
        self._trimmed = []

    def reset(self) -> None:
        """Let go of what is kept: the output has ended, or starts over."""
        self.restart()

    def width(self, num_outputs: int, num_new_rows: int) -> int:
        """The most rows of a step."""
        width = self.revise.window
        if not self.revise.adaptive:
            return width
        return window_for(width, num_outputs, self.free_rows - num_new_rows)

    def tail(self, newest: ReadSpan, age: int) -> ReadSpan:
        """The tail as the row ``age`` before the newest sees it."""
        length = newest.length - age
        # where rows read everything, those of a window read what is final together
        return replace(
            newest,
            pages=self._pages(newest, length),
            length=length,
            sharable=max(newest.sharable, self.window.sealed),
        )

    def _pages(self, tail: ReadSpan, length: int) -> Rows[int]:
        """The pages that ``length`` keys of the tail stand in: the same object as long as it is the
        same pages, by which rows are known from step to step.
        """
        count = -(-length // self.page_size)
        if count == len(tail.pages):
            return tail.pages
        if len(self._trimmed) != count:
            self._trimmed = list(tail.pages[:count])
        return self._trimmed


def revision_of(sequence: FeatureSequence) -> Revision | None:
    """The revision that a sequence has, if any."""
    return next((one for one in sequence.features if isinstance(one, Revision)), None)
