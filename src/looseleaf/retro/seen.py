"""Seen-sets: shift registers of the rows in a window that have read a page; effective KV exposure.

One byte a page (and layer and KV head): before a step, bit ``j - 1`` marks a page read ``j`` steps
ago. A row of age ``i``, the query of ``i`` steps ago, has read a page if any of the last ``i``
steps did. `unseen` and `mark_read` read no numbers back, so a graph can capture them.

Exposure counts pages that a row reads over its window, relative to its own step. RetroAttention
explains its gain by this figure: later rows' pages are read for this row too. The
paper counts 1.17 times the budget with 1 later row, and 1.60 times with 7."""

from collections import deque
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor


def unseen(
    registers: UInt8[Tensor, "rows kv_heads chosen"], ages: Int[Tensor, " rows"]
) -> Bool[Tensor, "rows kv_heads chosen"]:
    """Mask of the pages with these registers that rows of these ages have not read, per KV head; a
    row of age 0 has read none. These are the paper's sets of unseen pages.
    """
    since = ((1 << ages) - 1).to(torch.uint8)
    return registers & since[:, None, None] == 0


def mark_read(
    registers: UInt8[Tensor, "outputs kv_heads pages"],
    read: Bool[Tensor, "outputs kv_heads pages"],
) -> UInt8[Tensor, "outputs kv_heads pages"]:
    """The registers after a step that reads ``read``; reads older than a byte are lost."""
    return (registers << 1) | read.to(torch.uint8)


STEPS = 8
"""Bits of a register: 0 to 7 later rows."""


class Exposure:
    """Pages that rows of one output read within ``n`` steps after their own, for ``n`` from 0 to 7.

    Counts are sums over layers, KV heads and sampled rows. Only pages sealed at the row's own step
    count, since it always reads the others. The sums stay on the device until `totals`."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._sealed: deque[int] = deque(maxlen=STEPS)

    def book(self, registers: UInt8[Tensor, "layers kv_heads pages"], num_sealed: int) -> None:
        """Record a step: bit ``j`` of a register marks a page read ``j`` steps ago, and
        ``num_sealed`` pages were sealed. Samples one row in eight.
        """
        self._sealed.append(num_sealed)
        if len(self._sealed) < STEPS:
            return
        pages = registers[..., : self._sealed[0]]
        since = torch.arange(STEPS, device=pages.device)
        read = ((2 << since) - 1) << (STEPS - 1 - since)
        read_since = (pages[..., None] & read.to(torch.uint8)) != 0
        counts = read_since.sum((0, 1, 2))
        self._total = counts if self._total is None else self._total + counts
        self._sealed.clear()

    def restart(self) -> None:
        """Begin a new sequence of steps; the counts stay."""
        self._sealed.clear()

    def totals(self) -> list[int]:
        """Pages read at a row's own step, and with 1 to 7 later steps."""
        return [0] * STEPS if self._total is None else self._total.tolist()


def exposure_ratios(totals: Sequence[int]) -> list[float]:
    """The effective budget for 0 to 7 later rows; 1.0 without samples."""
    return [total / totals[0] if totals[0] else 1.0 for total in totals]
