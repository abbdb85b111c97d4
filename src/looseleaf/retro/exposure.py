"""Effective KV exposure: what a row has read in the end, a page that it read at its own step.

RetroAttention's figure for why it works: pages that are read for later rows are read for this one
too. With 1 later row the paper counts 1.17 times the budget, with 7 later rows 1.60 times."""

from collections import deque
from collections.abc import Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

STEPS = 8
"""For 0 to 7 later rows: what a byte of a register tells."""


class Exposure:
    """Of one output, over layers, KV heads and the rows that were looked at: how many pages a row
    read at its own step or one of the ``n`` steps behind it, for ``n`` from 0 to 7.

    Only pages count that were sealed at the row's own step: others it reads anyhow. The sums stay
    on the device until they are asked for."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._sealed: deque[int] = deque(maxlen=STEPS)

    def book(self, registers: UInt8[Tensor, "layers kv_heads pages"], num_sealed: int) -> None:
        """A step has been made, after which bit ``j`` of a register says that the page was read
        ``j`` steps ago; ``num_sealed`` pages were sealed at it. Looks at one row in eight.
        """
        self._sealed.append(num_sealed)
        if len(self._sealed) < STEPS:
            return
        pages = registers[..., : self._sealed[0]]
        since = torch.arange(STEPS, device=pages.device)
        read = ((2 << since) - 1) << (STEPS - 1 - since)
        some = (pages[..., None] & read.to(torch.uint8)) != 0
        counts = some.sum((0, 1, 2))
        self._total = counts if self._total is None else self._total + counts
        self._sealed.clear()

    def restart(self) -> None:
        """The steps do not go on; what was counted stays."""
        self._sealed.clear()

    def totals(self) -> list[int]:
        """Pages read at a row's own step, and with 1 to 7 steps behind it."""
        return [0] * STEPS if self._total is None else self._total.tolist()


def exposure_ratios(totals: Sequence[int]) -> list[float]:
    """The effective budget for 0 to 7 later rows; 1.0 where nothing was looked at."""
    return [total / totals[0] if totals[0] else 1.0 for total in totals]
