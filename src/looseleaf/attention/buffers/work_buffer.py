"""A work list at fixed addresses, for graphs: written before every step, fetched by its replay."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.buffers.pinned_buffer import PinnedBuffer
from looseleaf.attention.plan.lists import OWN_NUMBERS, HostWork, IntArray, work_list
from looseleaf.ops.partial_attention.unit_numbers import number_sizes, unit_numbers
from looseleaf.ops.partial_attention.work_list import Tile, WorkList


@dataclass(frozen=True)
class WorkCapacity:
    """The sizes of a `WorkBuffer`."""

    rows: int
    items: int
    entries: int
    pages: int
    mask_words: int = 0

    def holds(self, work: HostWork) -> bool:
        return (
            work.num_rows <= self.rows
            and work.num_items <= self.items
            and work.num_entries <= self.entries
            and work.num_pages <= self.pages
            and work.num_mask_words <= self.mask_words
        )

    def sizes(self, num_tiles: int) -> dict[str, int]:
        """The length of every array of the list."""
        sizes = {
            "num_items": 1,
            "item_page_indptr": self.items + 1,
            "item_entry_indptr": self.items + 1,
            "mask_words": self.mask_words,
            "row_positions": self.rows,
            "row_state_indptr": self.rows + 1,
            "row_own": OWN_NUMBERS * self.rows,
            "tile_indptr": num_tiles + 1,
        }
        sizes |= dict.fromkeys(("item_kv_head", "item_explicit"), self.items)
        sizes |= dict.fromkeys(("page_indices", "page_positions"), self.pages)
        sizes |= number_sizes(self.items, self.entries)
        names = ("entry_row", "entry_offset", "entry_bound", "entry_mask", "entry_state")
        return sizes | dict.fromkeys(names, self.entries)


@dataclass(eq=False)
class WorkBuffer:
    """``work`` is always the same object; rows past the loaded ones have no states. ``more`` has
    the sizes of further arrays that travel with the list; ``numbers`` has them on the device."""

    capacity: WorkCapacity
    tiles: tuple[Tile, ...]
    device: torch.device
    more: Mapping[str, int] = field(default_factory=dict)
    work: WorkList = field(init=False)
    numbers: Mapping[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.capacity.sizes(len(self.tiles))
        self._buffer = PinnedBuffer({**sizes, **self.more}, self.device, sides=2)
        tensors = self._buffer.tensors
        self.work = work_list({name: tensors[name] for name in sizes}, self.tiles)
        self.numbers = {name: tensors[name] for name in self.more}

    def load(self, work: HostWork, more: Mapping[str, IntArray] | None = None) -> None:
        """Write ``work``, which the capacity holds and whose tiles are the buffer's."""
        assert self.capacity.holds(work) and work.tiles == self.tiles, (
            "the list exceeds the buffer's capacity"
        )
        # padding rows have no states
        states, own = work.arrays["row_state_indptr"], work.arrays["row_own"]
        padding = np.ones(self.capacity.rows - work.num_rows, np.int32)
        states = np.concatenate([states, padding * states[-1]])
        own = np.concatenate([own, np.zeros(OWN_NUMBERS * len(padding), np.int32)])
        numbers = unit_numbers(work.arrays, work.final)
        padded = {"row_state_indptr": states, "row_own": own}
        self._buffer.load({**work.arrays, **numbers, **padded, **(more or {})})

    def fetch(self) -> None:
        """Copy the loaded list to the device, in stream order."""
        self._buffer.fetch()

    def sent(self) -> None:
        """As `PinnedBuffer.sent`."""
        self._buffer.sent()

    def unsent(self) -> None:
        """As `PinnedBuffer.unsent`."""
        self._buffer.unsent()
