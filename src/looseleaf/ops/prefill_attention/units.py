"""The units in which the kernel of the Hopper generation reads a span list: its tiles, whole or in
parts.

Few tiles leave processors idle, so their keys are read in several parts at a time, each of which
leaves a state of its own, and the states of a row are merged (docs/ideas.md). A part holds whole
blocks of keys, counted over all spans that the rows of its tile may see, wherever spans begin and
end.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from looseleaf.ops.native.native_build import load_library

IntArray = npt.NDArray[np.integer[Any]]

KEYS = 128
"""Keys of a block: a part begins and ends at a multiple of it from the first of a span."""
UNIT_NUMBERS = 8
"""Numbers of a unit: first row, rows, first and end span, the slot from which on its first span is
read and the one before which its last, state of its first row, states from a row to the next."""

STEPS = 4
"""A length is counted in so many steps a block, and a border of spans in whole steps."""

_ARRAYS = (
    "tile_row_indptr",
    "tile_request",
    "request_span_indptr",
    "span_offset",
    "span_length",
    "span_explicit",
    "row_positions",
    "row_patch_bounds",
)


@dataclass(frozen=True)
class UnitCosts:
    """What units cost, in microseconds: ``start`` each, ``per_block`` for a block of keys and
    ``border`` to go on from one span to the next, while ``programs`` are in flight; and a merge,
    ``launch`` and ``per_state`` for a row and KV head."""

    programs: int
    start: float
    per_block: float
    border: float
    launch: float
    per_state: float

    @property
    def border_steps(self) -> int:
        """A border as a part of a unit's length."""
        return round(STEPS * self.border / self.per_block)

    def time(self, steps: int, num_states: int, num_heads: int) -> float:
        """How long units take that are in flight at the same time, of so many ``steps`` at most;
        they leave ``num_states`` states that are to be merged, or none."""
        time = self.start + self.per_block * steps / STEPS
        return time + self.launch + self.per_state * num_states * num_heads if num_states else time


class _Lists(ctypes.Structure):
    _fields_ = (
        ("arrays", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tiles", "requests", "spans", "rows", "patched")),
        ("num_heads", ctypes.c_int64),
    )


class _Costs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("start", "per_block", "launch", "per_state")),
        ("programs", ctypes.c_int64),
        ("border", ctypes.c_int64),
    )


def span_units(
    arrays: Mapping[str, IntArray], num_heads: int, costs: UnitCosts | None
) -> tuple[dict[str, npt.NDArray[np.int32]], int]:
    """``num_units``, ``unit_numbers`` and ``row_state_indptr`` of the arrays of a span list, and
    how many states its units leave; 0 if every row has one only, which is its answer.

    Without ``costs`` tiles are read whole. With them all are cut to one length, so that all parts
    are in flight at a time, if they are read sooner so: parts that wait for others cost more than
    they save, and one that crosses a border of spans has fewer blocks than one that does not
    (docs/log.md). In C, which needs a compiler as Triton does: raises NativeUnavailable without."""
    tiles, rows = len(arrays["tile_request"]), len(arrays["row_positions"])
    requests, spans = len(arrays["request_span_indptr"]) - 1, len(arrays["span_length"])
    patched = "row_patch_bounds" in arrays
    names = _ARRAYS if patched else _ARRAYS[:-1]
    # each address that is asked for costs a microsecond
    flat = np.concatenate([arrays[name] for name in names], dtype=np.int32)
    sizes = tiles, requests, spans, rows, patched
    lists = _Lists(flat.ctypes.data, *sizes, num_heads)
    most, told = tiles, None
    if costs is not None:
        most = max(most, costs.programs // num_heads)
        times = costs.start, costs.per_block, costs.launch, costs.per_state
        told = ctypes.byref(_Costs(*times, costs.programs, costs.border_steps))
    made = np.empty(UNIT_NUMBERS * most + rows + 1, dtype=np.int32)
    count = _listing()(ctypes.byref(lists), told, most, made.ctypes.data)
    if count < 0:
        raise MemoryError(f"no memory for the units of {tiles:,} tiles")
    states = made[UNIT_NUMBERS * most :]
    units = {
        "num_units": np.array([count], dtype=np.int32),
        "unit_numbers": made[: UNIT_NUMBERS * count],
        "row_state_indptr": states,
    }
    return units, int(states[-1]) if count > tiles else 0


@cache
def _listing() -> Any:
    source = (
        resources.files("looseleaf.ops.prefill_attention")
        .joinpath("units.c")
        .read_text(encoding="utf-8")
    )
    # times are compared: they are rounded as the reference rounds them
    listing = load_library(source, (), ("-ffp-contract=off",)).looseleaf_units
    listing.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    listing.restype = ctypes.c_int64
    return listing
