"""The revision of an output whose rows read hosted documents by their indexes.

Only the newest row searches; the rows before it attend to those of the keys it found that they
have not read yet. What stands in the pool all rows of the window read anew, so nothing of it is
kept, and the keys of the window's own tokens are never stale."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from looseleaf.attention.host.window import HostedWindow, WindowRow, WindowShape
from looseleaf.attention.plan.groups import DecodeRow
from looseleaf.retro.revision import Revision


@dataclass(eq=False)
class KeyRevision(Revision):
    """That of an output of a model with this ``shape``; ``settle`` waits until a step that is on
    its way has read."""

    counts_keys: ClassVar[bool] = True
    shape: WindowShape
    settle: Callable[[], None]
    _kept: HostedWindow | None = None

    def __post_init__(self) -> None:
        # of rows so many steps old: how many were computed, and what they read for the first time
        self._rows = np.zeros(self.revise.window, dtype=np.int64)
        self._tallies = np.zeros_like(self._rows)

    def window_rows(self, newest: DecodeRow, width: int) -> list[DecodeRow]:
        if width == 1 or not any(read.leaves_out for read in newest.hosted):
            self.restart()
            return [newest]
        self.window.advance(newest.position, width, newest.tail.offset, self.page_size)
        return [self._row(newest, age) for age in range(self.window.num_rows)]

    def launched(self) -> None:
        self._rows[: self.window.num_rows] += 1

    def counts(self) -> list[int]:
        """Keys, over layers, documents and query heads, those that are always read among them; as
        if all rows had lived as long as a window."""
        # threads count while they read, and all rows of a step are booked when it is launched
        self.settle()
        share = self._rows[0] / np.maximum(self._rows, 1)
        return [round(count) for count in np.cumsum(self._tallies * share).tolist()]

    def reset(self) -> None:
        self.restart()
        self._kept = None

    def _row(self, newest: DecodeRow, age: int) -> DecodeRow:
        """The row ``age`` before the newest."""
        if self._kept is None:
            self._kept = HostedWindow(self.shape, self.revise.window, self._tallies)
        tail, at = self.tail(newest.tail, age), WindowRow(self._kept, age)
        return DecodeRow(
            newest.position - age, newest.settled, tail, hosted=newest.hosted, window=at
        )
