"""The work list of decode attention: page runs of segments, and the query rows that read them.

Plain int32 tensors of fixed capacity, with counts on the device, so that a step replays as a CUDA
graph. The host or a kernel fills the arrays: patches, selection and revision need no other form.

A kernel reads its list while the previous kernel still runs. A kernel that fills a list therefore
needs another launch in between; only the arrays of a `Tile.chosen` may come from the previous
kernel."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Compile-time sizes and kind of one launch of the kernel.

    A tile has ``block_m`` packed rows (entries × query heads of a KV head) and ``block_n`` keys.
    Items with more rows are correct but slow.

    - ``chosen``: the device fills the items, so the host does not have their page counts.
    - ``finishing``: the items are read by the merge of their rows (`looseleaf.ops.finish_rows`).
    - ``whole``: an item has all keys of its rows; state ``r`` is the final state of row ``r``."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    chosen: bool = False
    finishing: bool = False
    whole: bool = False


@dataclass(frozen=True)
class WorkList:
    """Items in CSR form: item ``i`` reads a run of pages for a run of entries; an entry is a query
    row.

    Item ``i`` of ``num_items[0]`` (arrays may be longer):

    - pages ``item_page_indptr[i] : item_page_indptr[i + 1]`` of ``page_indices`` (physical page)
      and ``page_positions`` (frame position of the page's first slot: rising in an item, with gaps
      between selected pages)
    - entries ``item_entry_indptr[i] : item_entry_indptr[i + 1]``
    - ``item_kv_head[i]``: its KV head, or -1 for all (selection is per KV head)
    - ``item_explicit[i]``: 1 if key positions are ``slot_positions[page, slot]`` (a patch; unused
      slots hold -1), 0 if they are ``page_positions + slot``

    Entry ``e``:

    - ``entry_row[e]``: the query row
    - ``entry_offset[e]``: Δ, the position of the segment's frame for this row; the query is rotated
      by ``row_positions[row] - Δ``
    - ``entry_bound[e]``: keys at frame positions >= bound are hidden (segment length and causality)
    - ``entry_mask[e]``: first word in ``mask_words`` of this row's bitmap over frame positions, or
      -1; a set bit hides the key (the row's patch replaces it)
    - ``entry_state[e]``: the partial state that it writes; row ``r`` owns the states
      ``row_state_indptr[r] : row_state_indptr[r + 1]``

    A state, or a head of it, without an entry is empty. ``complete``: no state of a row is empty.

    ``tiles`` describe the launches. Tile ``t`` takes items ``tile_indptr[t] : tile_indptr[t + 1]``;
    the tiles cover all items. No page of such an item starts after the bounds of all its rows.
    Without tiles, one tile fits the average item.

    ``page_seen`` holds bits for the first elements of ``page_indices`` (RetroAttention): the
    ``n``-th entry of an item reads a page if the page's lowest ``n`` bits are 0.

    An item of a ``finishing`` tile has one row, and a row has at most one such item. Its states
    come after those of the rows, and `looseleaf.ops.finish_rows` reads the item instead.
    ``row_own[4 * r : 4 * r + 4]`` holds the item's first index in ``page_indices``, its slots (0
    for no item), Δ and bound.

    ``item_numbers`` and ``entry_numbers`` repeat the lists in the kernel's layout
    (`looseleaf.ops.partial_attention.unit_numbers`); lists with tiles have them on a GPU."""

    num_items: Int[Tensor, "1"]
    item_page_indptr: Int[Tensor, " items_plus_one"]
    item_entry_indptr: Int[Tensor, " items_plus_one"]
    item_kv_head: Int[Tensor, " items"]
    item_explicit: Int[Tensor, " items"]
    page_indices: Int[Tensor, " page_capacity"]
    page_positions: Int[Tensor, " page_capacity"]
    entry_row: Int[Tensor, " entries"]
    entry_offset: Int[Tensor, " entries"]
    entry_bound: Int[Tensor, " entries"]
    entry_mask: Int[Tensor, " entries"]
    entry_state: Int[Tensor, " entries"]
    mask_words: Int[Tensor, " words"]
    row_positions: Int[Tensor, " rows"]
    row_state_indptr: Int[Tensor, " rows_plus_one"]
    tile_indptr: Int[Tensor, " tiles_plus_one"] | None = None
    tiles: tuple[Tile, ...] = ()
    complete: bool = False
    row_own: Int[Tensor, " four_times_rows"] | None = None
    page_seen: Int[Tensor, " first_pages"] | None = None
    item_numbers: Int[Tensor, " eight_times_items"] | None = None
    entry_numbers: Int[Tensor, " four_times_entries"] | None = None

    @property
    def finishing(self) -> bool:
        """Whether the merge of states reads items."""
        return any(tile.finishing for tile in self.tiles)

    @property
    def whole(self) -> bool:
        """Whether the states are the rows' final states."""
        return any(tile.whole for tile in self.tiles)

    @property
    def state_capacity(self) -> int:
        """Number of partial states that the entries can write."""
        return self.entry_row.shape[0]
