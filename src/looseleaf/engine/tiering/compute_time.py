"""How fast a model computes, as measured: seconds of a step by its rows and what they read.

Measured once at the start, with passes over pages that nobody uses, and then by the steps that run.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from looseleaf.attention.plan.chunks import PrefillChunk, is_patched
from looseleaf.attention.plan.groups import Positions

_MEMORY = 0.98
_MOST_WAITING = 0.1


@runtime_checkable
class Moment(Protocol):
    """When a stream came to a point, as an event of `torch.cuda` knows it; times in ms."""

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


Waits = Sequence[tuple[Moment, Moment]]
"""When a stream began to wait for something, and when that had come."""


@dataclass(frozen=True)
class Launched:
    """A step on a GPU, to be observed once it has ended."""

    begun: Moment
    ended: Moment
    rows: int
    pairs: int
    blends: bool
    waits: Waits


@dataclass(eq=False)
class ComputePace:
    """``seconds = a + b rows + c pairs``, fitted to the steps so far with fading weights; a pair is
    a row and a key that it reads or passes over, in one layer. Nothing is known before `observe`
    was called.

    A pass that ``blends`` passes over tokens that are replaced, and reads what replaces them
    besides: its pairs have a ``c`` of their own, which is that of others until one was observed.
    """

    _products: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 4)))
    _targets: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    _fit: npt.NDArray[np.float64] | None = None
    pending: list[Launched] = field(default_factory=list)

    def observe(self, rows: int, pairs: int, seconds: float, *, blends: bool = False) -> None:
        """A step of so many rows and pairs took that long."""
        # relative errors count: a short step tells as much as a long one
        x = _terms(rows, pairs, blends) / seconds
        self._products = _MEMORY * self._products + np.outer(x, x)
        self._targets = _MEMORY * self._targets + x
        # fitted here and not when it is asked for, which is in front of a launch
        self._fit = _nonnegative(self._products, self._targets)

    def predict(self, rows: int, pairs: int, *, blends: bool = False) -> float | None:
        """How many seconds a step of so many rows and pairs takes, or a pass that ``blends``; None
        if nothing is known.
        """
        if self._fit is None:
            return None
        knows = bool(self._products[3, 3]) or not blends
        return float(self._fit @ _terms(rows, pairs, blends and knows))

    def begin(self, device: torch.device) -> "torch.cuda.Event | float":
        """The clock of a step that is launched now."""
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(
        self,
        begun: "torch.cuda.Event | float",
        rows: int,
        pairs: int,
        *,
        blends: bool = False,
        waits: Waits = (),
    ) -> None:
        """The step is launched; on a GPU it is observed once it was computed, less the ``waits`` on
        the way."""
        if isinstance(begun, float):
            self.observe(rows, pairs, time.perf_counter() - begun, blends=blends)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.pending.append(Launched(begun, event, rows, pairs, blends, waits))
        self.collect()

    def collect(self) -> None:
        """Observe the steps that were launched and have been computed; `end` does so behind each
        launch."""
        while self.pending and self.pending[0].ended.query():
            step = self.pending.pop(0)
            seconds = step.begun.elapsed_time(step.ended) / 1e3
            waited = sum(since.elapsed_time(until) for since, until in step.waits) / 1e3
            # behind a wait the device is idle until the host has launched something: a pass that
            # waits for a quarter of its time seems to compute for a tenth longer than it does
            if waited <= _MOST_WAITING * seconds:
                self.observe(step.rows, step.pairs, seconds - waited, blends=step.blends)


def count_pairs(chunks: Iterable[tuple[int, int]]) -> int:
    """Pairs of chunks, each ``rows`` at the end of ``keys``: every row reads what is before it."""
    return sum(rows * keys - rows * (rows - 1) // 2 for rows, keys in chunks)


def count_keys(positions: Positions) -> int:
    """Pairs of rows at these positions, each with what stands there or before."""
    if isinstance(positions, range):
        return count_pairs([(len(positions), positions.stop)])
    return int(np.sum(positions)) + len(positions)


def count_read(chunk: PrefillChunk) -> int:
    """Pairs of a chunk: what its rows read, and what they pass over since it is replaced."""
    if not is_patched([chunk]):
        return count_keys(chunk.positions)
    rows, pairs = np.asarray(chunk.positions), 0
    for span in chunk.spans:
        if span.places is None:
            pairs += int(np.clip(rows - (span.offset - 1), 0, span.length).sum())
        else:
            pairs += int(np.searchsorted(np.asarray(span.places), rows, "right").sum())
    return pairs


def passes_over(chunks: Iterable[PrefillChunk]) -> bool:
    """Whether rows pass over tokens that are replaced."""
    return any(span.hidden is not None for chunk in chunks for span in chunk.spans)


def _terms(rows: int, pairs: int, blends: bool) -> npt.NDArray[np.float64]:
    return np.array([1.0, rows, 0, pairs] if blends else [1.0, rows, pairs, 0], dtype=np.float64)


def _nonnegative(
    products: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The least-squares fit without negative terms: none of them can save time."""
    # nothing is known of terms that never were
    active = [n for n in range(len(targets)) if products[n, n] > 0]
    while active:
        part = products[np.ix_(active, active)]
        scale = 1.0 / np.sqrt(np.diag(part))
        solved, *_ = np.linalg.lstsq(
            part * np.outer(scale, scale), targets[active] * scale, rcond=1e-9
        )
        solved = solved * scale
        if (solved >= 0).all():
            fit = np.zeros(len(targets))
            fit[active] = solved
            return fit
        del active[int(np.argmin(solved / scale))]
    return np.zeros(len(targets))
