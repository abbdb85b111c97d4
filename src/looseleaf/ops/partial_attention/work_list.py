"""The work list of decode attention: page runs of segments times the query rows that read them.

Plain int32 tensors of fixed capacity with counts on the device, so that a step replays as a CUDA
graph and later policies (patches, selection, revision) fill the same arrays, from the host or from
a kernel.

Kernels read a list while the kernel before them still runs. Who fills it on the device has another
launch stand in between; only what a `Tile.chosen` reads may come from the one before."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """What one launch of the kernel is compiled and sized for.

    ``block_m`` packed rows (entries × query heads of a KV head) by ``block_n`` keys. An item with
    more rows than that is right, and slow. Items of a ``chosen`` tile are filled on the device, so
    that nobody knows how many pages they have, if any. Items of a ``finishing`` one are read when
    the states of their rows are merged. Items of a ``whole`` one are all that their rows read: the
    only state of row ``r`` is state ``r``, and its answer.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_processor: int
    chosen: bool = False
    finishing: bool = False
    whole: bool = False


@dataclass(frozen=True)
class WorkList:
    """Items in CSR form: item ``i`` reads a run of pages for a run of entries; an entry is one
    query row.

    Item ``i`` (of ``num_items[0]``; the arrays may be longer):

    - pages ``item_page_indptr[i] : item_page_indptr[i + 1]`` into ``page_indices`` (physical page)
      and ``page_positions`` (frame position of the page's first slot: rising in an item, but
      selected pages need not be neighbours)
    - entries ``item_entry_indptr[i] : item_entry_indptr[i + 1]``
    - ``item_kv_head[i]``: the one KV head it is for, or -1 for all (selection is per KV head)
    - ``item_explicit[i]``: 1 if key positions are read from ``slot_positions[page, slot]`` (a
      patch; unused slots hold -1), 0 if they are ``page_positions + slot``

    Entry ``e``:

    - ``entry_row[e]``: which query row
    - ``entry_offset[e]``: Δ, where the segment's frame stands for that row; the query is rotated by
      ``row_positions[row] - Δ``
    - ``entry_bound[e]``: keys at frame positions >= bound are not visible (segment length and
      causality)
    - ``entry_mask[e]``: -1, or the word of ``mask_words`` where this row's bitmap over frame
      positions begins; a set bit hides the key (it was replaced by the row's patch)
    - ``entry_state[e]``: which partial state it writes; the states of row ``r`` are
      ``row_state_indptr[r] : row_state_indptr[r + 1]``

    A state (or a head of it) that no entry writes is empty. ``complete`` promises that there is
    none among the states of the rows.

    ``tiles`` may say how to launch: tile ``t`` takes the items ``tile_indptr[t] : tile_indptr[t +
    1]``, which are all of them, and no page of an item stands behind the bounds of all of its rows.
    Without tiles one is chosen that suits the average item.

    ``page_seen`` says of the first places of ``page_indices`` which entries have no need of the
    page any more (RetroAttention): the ``n``-th of an item sees it if its lowest ``n`` bits are 0.

    Items of a ``finishing`` tile are read by one row each, and a row reads one of them at most. Its
    states stand behind those of the rows: `looseleaf.ops.finish_rows` reads the item instead, and
    finds where its pages begin in ``page_indices``, their slots (0: there is no such item), Δ and
    bound at ``row_own[4 * r : 4 * r + 4]``.

    ``item_numbers`` and ``entry_numbers`` are the same lists once more, as a program wants them
    (`looseleaf.ops.partial_attention.unit_numbers`); a list with tiles has them on a GPU.
    """

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
        """Whether rows read items when their states are merged."""
        return any(tile.finishing for tile in self.tiles)

    @property
    def whole(self) -> bool:
        """Whether states are answers, one a row."""
        return any(tile.whole for tile in self.tiles)

    @property
    def state_capacity(self) -> int:
        """How many partial states the entries can write."""
        return self.entry_row.shape[0]
