"""Revision of an output that reads host-resident documents by their indexes.

Only the newest row searches. Past rows attend to the returned keys that they have not read yet. All
rows reread the keys in the pool at every step, so no state holds a stale key."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from looseleaf.attention.plan.groups import DecodeRow
from looseleaf.index.host.window import HostedWindow, WindowRow, WindowShape
from looseleaf.retro.revision import Revision


@dataclass(eq=False)
class KeyRevision(Revision):
    """Revision for a model of this ``shape``; ``settle`` waits until a step in flight has read."""

    counts_keys: ClassVar[bool] = True
    shape: WindowShape
    settle: Callable[[], None]
    _kept: HostedWindow | None = None

    def __post_init__(self) -> None:
        # by age of a row: rows computed, and keys read for the first time
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
        """Keys over layers, documents and query heads, including the always-read ones; scaled as if
        all rows had completed their window."""
        # threads count while they read, but rows count at the launch
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
