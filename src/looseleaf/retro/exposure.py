"""Effective KV exposure: what a row has read in the end, a page that it read at its own step.

RetroAttention's figure for why it works: pages that are read for later rows are read for this one
too. With 1 later row the paper counts 1.17 times the budget, with 7 later rows 1.60 times."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import UInt8
from torch import Tensor

STEPS = 8
"""For 0 to 7 later rows: what a byte of a register tells."""


@dataclass
class Exposure:
    """Of one output, summed over steps, layers and KV heads: ``own[n]`` pages that a row read at
    its own step, and ``total[n]`` at that or one of the ``n`` steps behind it.

    Only pages count that were sealed at the row's own step: others it reads anyhow."""

    own: list[int] = field(default_factory=lambda: [0] * STEPS)
    total: list[int] = field(default_factory=lambda: [0] * STEPS)
    _sealed: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS))

    def book(self, registers: UInt8[Tensor, "layers kv_heads pages"], num_sealed: int) -> None:
        """Count a step, after which bit ``j`` of a register says that the page was read ``j`` steps
        ago; the first ``num_sealed`` pages were sealed at it.
        """
        self._sealed.appendleft(num_sealed)
        for later, known in enumerate(self._sealed):
            pages = registers[..., :known]
            self.own[later] += int(torch.count_nonzero(pages & (1 << later)))
            self.total[later] += int(torch.count_nonzero(pages & ((2 << later) - 1)))

    def restart(self) -> None:
        """The steps do not go on; what was counted stays."""
        self._sealed.clear()


def exposure_ratios(outputs: Sequence[Exposure]) -> list[float]:
    """The effective budget for 0 to 7 later rows, over several outputs; 1.0 where nothing was
    read.
    """
    own = [sum(o.own[n] for o in outputs) for n in range(STEPS)]
    total = [sum(o.total[n] for o in outputs) for n in range(STEPS)]
    return [t / o if o else 1.0 for t, o in zip(total, own, strict=True)]
