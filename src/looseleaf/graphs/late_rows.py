"""Late rows: rows that enter a step at a later layer, because earlier layers are computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.graphs.rows import IntArray, to_device
from looseleaf.types import LayerHook


@dataclass(frozen=True)
class LateRows:
    """Ascending ``rows`` of a step that enter at ``layer``, with their ``hidden`` states before it.

    Their keys and values of earlier layers are stored already and do not change."""

    layer: int
    rows: IntArray
    hidden: Tensor


def enter_late(late_rows: Sequence[LateRows], slots: Tensor) -> LayerHook:
    """The hook that inserts late rows; it runs before each layer at which rows enter.

    ``slots`` of the late rows are -1 until they enter, so earlier layers do not write their keys
    and values."""
    groups = [(late, to_device(torch.from_numpy(late.rows), slots.device)) for late in late_rows]
    late_slots = [slots[rows] for _, rows in groups]
    for _, rows in groups:
        slots[rows] = -1

    def enter(layer: int, hidden: Tensor) -> Tensor:
        for (late, rows), own_slots in zip(groups, late_slots, strict=True):
            if late.layer == layer:
                slots[rows] = own_slots
                hidden = hidden.index_copy(0, rows, late.hidden)
        return hidden

    return enter
