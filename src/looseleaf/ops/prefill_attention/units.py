"""The units of a span list for the Hopper kernel: its tiles, whole or cut into parts.

Few tiles leave SMs idle. Their keys are then split into parts, each of which leaves a state, and
the states of a row are merged (docs/ideas.md). A part has whole blocks of keys, counted over all
spans that the tile's rows may see, across borders of spans."""

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
"""Keys per block: a part begins and ends at a multiple of it from a span's first key."""
UNIT_NUMBERS = 8
"""Numbers per unit: first row, rows, first and end span, first slot in its first span, end slot in
its last span, state of its first row, and states from a row to the next."""

STEPS = 4
"""Steps per block; lengths of parts and borders of spans are whole steps."""

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
    """Costs in microseconds, with ``programs`` units in flight.

    A unit costs ``start``, ``per_block`` for a block of keys and ``border`` for each next span. A
    merge costs ``launch``, and ``per_state`` for a row and KV head."""

    programs: int
    start: float
    per_block: float
    border: float
    launch: float
    per_state: float

    @property
    def border_steps(self) -> int:
        """The cost of a border, in steps."""
        return round(STEPS * self.border / self.per_block)

    def time(self, steps: int, num_states: int, num_heads: int) -> float:
        """Time of concurrent units of at most ``steps`` steps, and of the merge of ``num_states``
        states if there are any."""
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
    """``num_units``, ``unit_numbers`` and ``row_state_indptr`` of a span list's arrays, and the
    number of states.

    The number of states is 0 if every row has one state, which is final. Without ``costs`` tiles
    stay whole. With costs, all tiles are cut into parts of one length, so that all parts run
    concurrently, if that is faster. Parts that wait for others cost more than they save; a part
    across a border of spans has fewer blocks (docs/log.md). The C code follows `units_reference`.
    Raises NativeUnavailable without a C compiler, and MemoryError."""
    tiles, rows = len(arrays["tile_request"]), len(arrays["row_positions"])
    requests, spans = len(arrays["request_span_indptr"]) - 1, len(arrays["span_length"])
    has_patches = "row_patch_bounds" in arrays
    names = _ARRAYS if has_patches else _ARRAYS[:-1]
    # one array: each ctypes address costs a microsecond
    flat = np.concatenate([arrays[name] for name in names], dtype=np.int32)
    sizes = tiles, requests, spans, rows, has_patches
    lists = _Lists(flat.ctypes.data, *sizes, num_heads)
    max_units, costs_pointer = tiles, None
    if costs is not None:
        max_units = max(max_units, costs.programs // num_heads)
        times = costs.start, costs.per_block, costs.launch, costs.per_state
        costs_pointer = ctypes.byref(_Costs(*times, costs.programs, costs.border_steps))
    output = np.empty(UNIT_NUMBERS * max_units + rows + 1, dtype=np.int32)
    count = _load_units()(ctypes.byref(lists), costs_pointer, max_units, output.ctypes.data)
    if count < 0:
        raise MemoryError(f"no memory for the units of {tiles:,} tiles")
    states = output[UNIT_NUMBERS * max_units :]
    units = {
        "num_units": np.array([count], dtype=np.int32),
        "unit_numbers": output[: UNIT_NUMBERS * count],
        "row_state_indptr": states,
    }
    return units, int(states[-1]) if count > tiles else 0


@cache
def _load_units() -> Any:
    source = (
        resources.files("looseleaf.ops.prefill_attention")
        .joinpath("units.c")
        .read_text(encoding="utf-8")
    )
    # the code compares times, so they must round as in the reference
    function = load_library(source, (), ("-ffp-contract=off",)).looseleaf_units
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    function.restype = ctypes.c_int64
    return function
