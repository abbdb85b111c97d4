"""The arrays of a span list on the host, before the copy to a device."""

from collections.abc import Mapping
from typing import NamedTuple

from looseleaf.attention.plan.lists import IntArray
from looseleaf.ops.prefill_attention.units import UNIT_NUMBERS


class HostSpans(NamedTuple):
    """The arrays of a `SpanList` on the host; ``parts``, ``num_states`` and ``groups`` as there."""

    arrays: Mapping[str, IntArray]
    parts: int
    num_states: int = 0
    groups: int = 2

    @property
    def num_tiles(self) -> int:
        return len(self.arrays["tile_request"])

    @property
    def num_requests(self) -> int:
        return len(self.arrays["request_span_indptr"]) - 1

    @property
    def num_spans(self) -> int:
        return len(self.arrays["span_length"])

    @property
    def num_pages(self) -> int:
        return len(self.arrays["page_indices"])

    @property
    def num_mask_words(self) -> int:
        """0 if no row of the list has a patch."""
        return len(self.arrays["mask_words"])

    @property
    def num_units(self) -> int:
        """0 for a list without units."""
        return len(self.arrays.get("unit_numbers", ())) // UNIT_NUMBERS

    @property
    def num_gathered(self) -> int:
        """Slots of the gathered pages, 0 if keys are read in place."""
        return len(self.arrays.get("source_slots", ()))
