"""Rows of a step that come to its layers late, since the first ones were passed elsewhere: what
chose the tokens of a request by their deviation has computed them up to there."""

from collections.abc import Iterable

import numpy as np

from looseleaf.blend.fusion import Fusion
from looseleaf.engine.scheduler import Chunk
from looseleaf.graphs.late_rows import Entering


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
