"""The revision window of one output, for pages and for host-resident keys.

A step has the newest row and the window's past rows, each at its own position. Keys and values of
past rows overwrite their old slots."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from typing import ClassVar

from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.config import Revise
from looseleaf.prompt.feature import Feature, FeatureSequence
from looseleaf.retro import Window, window_for


@dataclass(eq=False)
class Revision(Feature):
    """One output's window. An adaptive window shrinks above ``free_rows`` rows a step.
    ``counts_keys`` tells whether `counts` are of keys, not of pages.
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
        """The rows of a step, newest first; ``rows`` has the single row without revision.

        The state restarts if the newest row reads everything, or the window shrinks to one row."""
        [newest] = rows
        return self.window_rows(newest, self.width(num_outputs, num_new_rows))

    def window_rows(self, newest: DecodeRow, width: int) -> list[DecodeRow]:
        """``newest`` and its past rows, at most ``width`` in all."""
        raise NotImplementedError

    def counts(self) -> list[int]:
        """Reads of rows at their own step, and including later steps, as far as counted."""
        raise NotImplementedError

    def restart(self) -> None:
        """Drop the state of all rows."""
        self.window.restart()
        self._trimmed = []

    def reset(self) -> None:
        """Release the state: the output has ended, or restarts."""
        self.restart()

    def width(self, num_outputs: int, num_new_rows: int) -> int:
        """The most rows of a step."""
        width = self.revise.window
        if not self.revise.adaptive:
            return width
        return window_for(width, num_outputs, self.free_rows - num_new_rows)

    def tail(self, newest: ReadSpan, age: int) -> ReadSpan:
        """The tail that the row ``age`` before the newest sees."""
        length = newest.length - age
        # in dense layers the rows of a window share the read of final pages
        return replace(
            newest,
            pages=self._pages(newest, length),
            length=length,
            sharable=max(newest.sharable, self.window.sealed),
        )

    def _pages(self, tail: ReadSpan, length: int) -> Rows[int]:
        """The pages of the tail's first ``length`` keys; the same object while they are the same
        pages, since the object identifies the row.
        """
        count = -(-length // self.page_size)
        if count == len(tail.pages):
            return tail.pages
        if len(self._trimmed) != count:
            self._trimmed = list(tail.pages[:count])
        return self._trimmed


def revision_of(sequence: FeatureSequence) -> Revision | None:
    """The revision of ``sequence``, None if it has none."""
    return next((feature for feature in sequence.features if isinstance(feature, Revision)), None)
