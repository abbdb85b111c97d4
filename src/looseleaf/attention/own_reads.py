"""What rows read alone and when they are merged, as `looseleaf.ops.finish_rows` takes it."""

import numpy as np

from looseleaf.ops.partial_attention.unit_numbers import IntArray

OWN_NUMBERS = 4
"""Numbers a row of ``WorkList.row_own``."""


def own_reads(
    num_rows: int, rows: IntArray, items: tuple[IntArray, IntArray, IntArray], page_size: int
) -> IntArray:
    """For each row where its pages begin, how many slots they have, Δ and bound; no slots if it
    reads nothing. ``items`` are page prefix sums, offsets and bounds of the items of ``rows``."""
    indptr, offset, bound = items
    own = np.zeros((num_rows, OWN_NUMBERS), dtype=np.int32)
    own[rows] = np.stack([indptr[:-1], np.diff(indptr) * page_size, offset, bound], axis=1)
    return own.ravel()
