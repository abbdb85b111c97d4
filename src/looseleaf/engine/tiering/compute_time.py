"""The compute time of a model: seconds of a step, predicted from its rows and the keys they read.

The first observations are passes over free pages at the start. Later ones are the engine's steps.
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
_CLASSES = 16
_MOST_WAITING = 0.1


@runtime_checkable
class Moment(Protocol):
    """A point of a stream in time, as an event of `torch.cuda`; times in ms."""

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


Waits = Sequence[tuple[Moment, Moment]]
"""Begin and end of each wait of a stream."""


@dataclass(frozen=True)
class Launched:
    """A step in flight on a GPU, which is observed after it has ended."""

    begun: Moment
    ended: Moment
    rows: int
    pairs: int
    blends: bool
    waits: Waits


@dataclass(eq=False)
class ComputeTime:
    """``seconds = a + b rows + c pairs``, fitted to all observed steps with fading weights.

    Steps fade by later steps of about as many rows, so a long decode leaves prefill known.
    A pair is a row and a key that it reads or skips, in one layer. A pass that ``blends`` skips
    replaced tokens and reads the patch. Its pairs have a separate ``c``; before the first such
    observation it uses the ``c`` of other passes."""

    # sums of each class of rows, of which each has twice as many as the class before
    _products: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((_CLASSES, 4, 4)))
    _targets: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((_CLASSES, 4)))
    _knows_blends: bool = False
    _fit: npt.NDArray[np.float64] | None = None
    pending: list[Launched] = field(default_factory=list)

    def observe(self, rows: int, pairs: int, seconds: float, *, blends: bool = False) -> None:
        """Add the time of one step to the fit."""
        # the fit minimises relative errors, so short steps weigh as much as long ones
        x = _terms(rows, pairs, blends) / seconds
        like = min(rows.bit_length(), _CLASSES - 1)
        self._products[like] = _MEMORY * self._products[like] + np.outer(x, x)
        self._targets[like] = _MEMORY * self._targets[like] + x
        self._knows_blends = self._knows_blends or blends
        # fitted here because `predict` runs before a launch
        self._fit = _nonnegative(self._products.sum(axis=0), self._targets.sum(axis=0))

    def predict(self, rows: int, pairs: int, *, blends: bool = False) -> float | None:
        """Expected seconds of a step; None before the first `observe`."""
        if self._fit is None:
            return None
        return float(self._fit @ _terms(rows, pairs, blends and self._knows_blends))

    def begin(self, device: torch.device) -> "torch.cuda.Event | float":
        """The start time of a step: seconds on a CPU, an event on a GPU."""
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
        """Observe a launched step. On a GPU this happens after it has ended, without its
        ``waits``."""
        if isinstance(begun, float):
            self.observe(rows, pairs, time.perf_counter() - begun, blends=blends)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.pending.append(Launched(begun, event, rows, pairs, blends, waits))
        self.collect()

    def collect(self) -> None:
        """Observe the steps in flight that have ended. `end` calls this after each launch."""
        while self.pending and self.pending[0].ended.query():
            step = self.pending.pop(0)
            seconds = step.begun.elapsed_time(step.ended) / 1e3
            waited = sum(since.elapsed_time(until) for since, until in step.waits) / 1e3
            # the device is idle after a wait until the next launch, which would count as compute
            if waited <= _MOST_WAITING * seconds:
                self.observe(step.rows, step.pairs, seconds - waited, blends=step.blends)


def count_pairs(chunks: Iterable[tuple[int, int]]) -> int:
    """Pairs of causal chunks, each ``(rows, keys)``: its rows are the last of its keys."""
    return sum(rows * keys - rows * (rows - 1) // 2 for rows, keys in chunks)


def count_keys(positions: Positions) -> int:
    """Pairs of rows at these positions, each with all keys up to its own position."""
    if isinstance(positions, range):
        return count_pairs([(len(positions), positions.stop)])
    return int(np.sum(positions)) + len(positions)


def count_read(chunk: PrefillChunk) -> int:
    """Pairs of a chunk: keys that its rows read, and replaced keys that they skip."""
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
    """Whether any chunk skips replaced tokens."""
    return any(span.hidden is not None for chunk in chunks for span in chunk.spans)


def _terms(rows: int, pairs: int, blends: bool) -> npt.NDArray[np.float64]:
    return np.array([1.0, rows, 0, pairs] if blends else [1.0, rows, pairs, 0], dtype=np.float64)


def _nonnegative(
    products: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The least-squares fit without negative terms, because no term can save time."""
    # a term without observations stays zero
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
