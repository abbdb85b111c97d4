"""Rows that enter a step at a later layer, because the layers before it are computed already."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.graphs.rows import IntArray, to_device
from looseleaf.types import LayerHook


@dataclass(frozen=True)
class Entering:
    """Rows ``rows`` of a step, rising, whose ``hidden`` states before ``layer`` are known; what
    they keep of the layers before is stored, and stays."""

    layer: int
    rows: IntArray
    hidden: Tensor


def enter_late(entering: Sequence[Entering], slots: Tensor) -> LayerHook:
    """The hook of a step with these rows, whose keys and values go to ``slots``: it withholds those
    of the rows that have not entered, and is called in front of the layers at which they do."""
    told = [(some, to_device(torch.from_numpy(some.rows), slots.device)) for some in entering]
    withheld = [slots[rows] for _, rows in told]
    for _, rows in told:
        slots[rows] = -1

    def enter(layer: int, hidden: Tensor) -> Tensor:
        for (some, rows), kept in zip(told, withheld, strict=True):
            if some.layer == layer:
                slots[rows] = kept
                hidden = hidden.index_copy(0, rows, some.hidden)
        return hidden

    return enter
