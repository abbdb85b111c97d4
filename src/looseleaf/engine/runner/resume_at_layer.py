"""Rows that resume at a layer: token scoring by deviation has computed the layers before it."""

from collections.abc import Iterable

import numpy as np

from looseleaf.blend.fusion import Fusion
from looseleaf.engine.scheduler import Chunk
from looseleaf.graphs.late_rows import LateRows


def find_late_rows(chunks: Iterable[Chunk], first_row: int) -> list[LateRows]:
    """The late rows of ``chunks``, whose first row is ``first_row`` of the step."""
    late_rows = []
    for chunk in chunks:
        begun = chunk.target.begun if isinstance(chunk.target, Fusion) else None
        if begun is not None:
            assert isinstance(chunk.target, Fusion) and chunk.target.positions is not None
            which = chunk.target.documents_among(chunk.start, chunk.stop)
            positions = chunk.target.positions[which]
            rows = np.searchsorted(chunk.target.rows.positions, positions) - chunk.start
            if len(rows):
                late_rows.append(LateRows(begun.layer, first_row + rows, begun.hidden[which]))
        first_row += chunk.stop - chunk.start
    return late_rows
