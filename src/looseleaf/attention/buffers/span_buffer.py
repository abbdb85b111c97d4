"""A span list at fixed addresses, for graphs: written before every pass, fetched by its replay."""

from dataclasses import dataclass, field

import numpy as np
import torch

from looseleaf.attention.buffers.pinned_buffer import PinnedBuffer
from looseleaf.attention.plan.host_spans import HostSpans
from looseleaf.attention.plan.lists import IntArray
from looseleaf.ops.gather_kv import UNUSED
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.ops.prefill_attention.units import UNIT_NUMBERS


@dataclass(frozen=True)
class SpanCapacity:
    """The sizes of a `SpanBuffer`, and the features of its lists.

    Each of these is zero for lists without the feature: ``mask_words`` for patches with the bounds
    of each row, ``units``, ``states`` for cut tiles, ``gathered`` slots for gathered keys."""

    rows: int
    tiles: int
    requests: int
    spans: int
    pages: int
    mask_words: int
    parts: int
    units: int = 0
    states: int = 0
    gathered: int = 0
    groups: int = 2

    def holds(self, spans: HostSpans) -> bool:
        """Whether ``spans`` fit, and launch the same kernels."""
        return (
            len(spans.arrays["row_positions"]) <= self.rows
            and spans.num_tiles <= self.tiles
            and spans.num_requests <= self.requests
            and spans.num_spans <= self.spans
            and spans.num_pages <= self.pages
            and spans.num_mask_words <= self.mask_words
            and bool(spans.num_mask_words) == bool(self.mask_words)
            and ("row_patch_bounds" in spans.arrays) == bool(self.mask_words)
            and spans.parts == self.parts
            and spans.groups == self.groups
            and spans.num_units <= self.units
            and bool(spans.num_units) == bool(self.units)
            and spans.num_states <= self.states
            and bool(spans.num_states) == bool(self.states)
            and spans.num_gathered <= self.gathered
            and bool(spans.num_gathered) == bool(self.gathered)
        )

    def sizes(self) -> dict[str, int]:
        """The length of every array of the list."""
        sizes = {
            "num_tiles": 1,
            "tile_row_indptr": self.tiles + 1,
            "tile_request": self.tiles,
            "request_span_indptr": self.requests + 1,
            "span_page_indptr": self.spans + 1,
            "page_indices": self.pages,
            "mask_words": self.mask_words,
            "row_positions": self.rows,
        }
        names = ("span_offset", "span_length", "span_explicit", "span_mask")
        sizes |= dict.fromkeys(names, self.spans)
        if self.mask_words:
            sizes["row_patch_bounds"] = self.rows
        if self.units:
            sizes |= {"num_units": 1, "unit_numbers": UNIT_NUMBERS * self.units}
            sizes["row_state_indptr"] = self.rows + 1
        if self.gathered:
            sizes |= {"source_slots": self.gathered, "source_turns": self.gathered}
        return sizes


@dataclass(eq=False)
class SpanBuffer:
    """``spans`` is always the same object; rows past the loaded ones are in no tile. As in a
    `PinnedBuffer` with one side, a writer waits for the previous fetch."""

    capacity: SpanCapacity
    device: torch.device
    spans: SpanList = field(init=False)

    def __post_init__(self) -> None:
        self._buffer = PinnedBuffer(self.capacity.sizes(), self.device)
        tensors, capacity = self._buffer.tensors, self.capacity
        self.spans = SpanList(
            **tensors,
            parts=capacity.parts,
            complete=False,
            num_states=capacity.states,
            groups=capacity.groups,
            value_start=0,
        )

    def load(self, spans: HostSpans) -> None:
        """Write ``spans``, which the capacity holds."""
        assert self.capacity.holds(spans), "the list exceeds the buffer's capacity"
        arrays = dict(spans.arrays)
        if self.capacity.units:
            # padding rows have no states
            states = arrays["row_state_indptr"]
            arrays["row_state_indptr"] = _padded(states, self.capacity.rows + 1, int(states[-1]))
        if self.capacity.gathered:
            slots = arrays["source_slots"]
            arrays["source_slots"] = _padded(slots, self.capacity.gathered, UNUSED)
        self._buffer.load(arrays)

    def fetch(self) -> None:
        """Copy the loaded list to the device, in stream order."""
        self._buffer.fetch()


def _padded(values: IntArray, length: int, padding: int) -> IntArray:
    whole = np.full(length, padding, dtype=np.int32)
    whole[: len(values)] = values
    return whole
