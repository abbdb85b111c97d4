"""Rows of a step that come to its layers late, since the first ones were passed elsewhere: what
chose the tokens of a request by their deviation has computed them up to there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from looseleaf.engine.fusion import Fusion, IntArray
from looseleaf.engine.rows import to_device
from looseleaf.engine.scheduler import Chunk
from looseleaf.types import LayerHook


@dataclass(frozen=True)
class Entering:
    """Rows ``rows`` of a step, rising, whose ``hidden`` states before ``layer`` are known; what
    they keep of the layers before is stored, and stays."""

    layer: int
    rows: IntArray
    hidden: Tensor


def find_entering(chunks: Iterable[Chunk], first_row: int) -> list[Entering]:
    """The rows of ``chunks`` that enter late, if those of the first one begin with
    ``first_row``."""
    found = []
    for chunk in chunks:
        begun = chunk.target.begun if isinstance(chunk.target, Fusion) else None
        if begun is not None:
            assert isinstance(chunk.target, Fusion) and chunk.target.positions is not None
            which = chunk.target.documents_among(chunk.start, chunk.stop)
            positions = chunk.target.positions[which]
            rows = np.searchsorted(chunk.target.rows.positions, positions) - chunk.start
            if len(rows):
                found.append(Entering(begun.layer, first_row + rows, begun.hidden[which]))
        first_row += chunk.stop - chunk.start
    return found


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
