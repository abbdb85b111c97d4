"""How fast a model computes, as measured: seconds of a step by its rows and what they read.

Measured once at the start, with passes over pages that nobody uses, and then by the steps that run.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from looseleaf.attention.groups import Positions

_MEMORY = 0.98
_LONGEST_MEASUREMENT = 1.0


@dataclass(eq=False)
class ComputePace:
    """``seconds = a + b rows + c pairs``, fitted to the steps so far with fading weights; a pair is
    a row and a key that it reads, in one layer. Nothing is known before `observe` was called.

    A pass that blends reads around tokens that are replaced, which takes longer; how much longer is
    one factor, learned from such passes.
    """

    _products: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 3)))
    _targets: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    _fit: npt.NDArray[np.float64] | None = None
    _blending: float | None = None
    _pending: list[tuple[torch.cuda.Event, torch.cuda.Event, int, int, bool]] = field(
        default_factory=list
    )

    def observe(self, rows: int, pairs: int, seconds: float) -> None:
        """A step of so many rows and pairs took that long."""
        # relative errors count: a short step tells as much as a long one
        x = np.array([1.0, rows, pairs]) / seconds
        self._products = _MEMORY * self._products + np.outer(x, x)
        self._targets = _MEMORY * self._targets + x
        self._fit = None

    def observe_blending(self, rows: int, pairs: int, seconds: float) -> None:
        """A pass that computes tokens again took that long."""
        plain = self.predict(rows, pairs)
        if plain:
            before = seconds / plain if self._blending is None else self._blending
            self._blending = before**0.7 * (seconds / plain) ** 0.3

    def predict(self, rows: int, pairs: int, *, blends: bool = False) -> float | None:
        """How many seconds a step of so many rows and pairs takes, or a pass that ``blends``; None
        if nothing is known.
        """
        self._collect()
        if not self._products[0, 0]:
            return None
        if self._fit is None:
            self._fit = _nonnegative(self._products, self._targets)
        plain = float(self._fit @ np.array([1.0, rows, pairs]))
        return plain * (self._blending or 1.0) if blends else plain

    def begin(self, device: torch.device) -> "torch.cuda.Event | float":
        """The clock of a step that is launched now."""
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(
        self, begun: "torch.cuda.Event | float", rows: int, pairs: int, *, blends: bool = False
    ) -> None:
        """The step is launched; on a GPU it is observed once it was computed."""
        if isinstance(begun, float):
            self._note(rows, pairs, time.perf_counter() - begun, blends)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._pending.append((begun, event, rows, pairs, blends))
        self._collect()

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].query():
            begun, event, rows, pairs, blends = self._pending.pop(0)
            self._note(rows, pairs, begun.elapsed_time(event) / 1e3, blends)

    def _note(self, rows: int, pairs: int, seconds: float, blends: bool) -> None:
        (self.observe_blending if blends else self.observe)(rows, pairs, seconds)


def count_pairs(chunks: Iterable[tuple[int, int]]) -> int:
    """Pairs of chunks, each ``rows`` at the end of ``keys``: every row reads what is before it."""
    return sum(rows * keys - rows * (rows - 1) // 2 for rows, keys in chunks)


def count_keys(positions: Positions) -> int:
    """Pairs of rows at these positions, each with what stands there or before."""
    if isinstance(positions, range):
        return count_pairs([(len(positions), positions.stop)])
    return int(np.sum(positions)) + len(positions)


def _nonnegative(
    products: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The least-squares fit without negative terms: none of the three can save time."""
    active = [0, 1, 2]
    while active:
        part = products[np.ix_(active, active)]
        scale = 1.0 / np.sqrt(np.diag(part))
        solved, *_ = np.linalg.lstsq(
            part * np.outer(scale, scale), targets[active] * scale, rcond=1e-9
        )
        solved = solved * scale
        if (solved >= 0).all():
            fit = np.zeros(3)
            fit[active] = solved
            return fit
        del active[int(np.argmin(solved / scale))]
    return np.zeros(3)
