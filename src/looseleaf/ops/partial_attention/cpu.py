"""Partial attention on the CPU: batched products over buckets of items with similar shapes.

`prepare` turns a work list into buckets, `run_prepared` runs them for a layer. Items are padded to
the longest of their bucket, and hidden keys get a bias of -inf. Pool pages are finite, so padding
never changes a result. `partial_attention_reference` defines the result."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.flash.cpu import (
    BoolArray,
    CopiedPages,
    IntArray,
    KeyBlock,
    PageLayout,
    attend_dense,
    page_memory,
    reads_in_place,
    visibility_bias,
)
from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.ops.rotate.cpu import Angles, AngleTable, rotate_heads
from looseleaf.types import AttnState, Rotation, ScoreRule

# (row, page) cells of padding that cost as much as one more bucket
_MAX_PADDING = 512


@dataclass(frozen=True)
class Bucket:
    """``num_items`` items, padded to ``num_rows`` rows and the same number of pages."""

    num_items: int
    num_rows: int
    keys: KeyBlock


@dataclass(frozen=True)
class PreparedWork:
    """A work list as buckets.

    ``rows`` and ``offsets`` are the query row and Δ of every padded entry, bucket after bucket.
    ``order[state]`` is the entry that writes a state, -1 if none does."""

    buckets: tuple[Bucket, ...]
    rows: IntArray
    offsets: IntArray
    order: IntArray

    def frame_rows(self, work: WorkList) -> Int[Tensor, " entries"]:
        """Position of each padded entry's query in its item's frame, clamped to 0."""
        offsets = torch.from_numpy(self.offsets)
        positions = work.row_positions.long()[torch.from_numpy(self.rows)]
        return positions.sub_(offsets).clamp_min_(0)


def partial_attention_cpu(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    work: WorkList,
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> AttnState:
    """See `looseleaf.ops.partial_attention`; prepares and runs in one call."""
    if not reads_in_place(k_pages, v_pages):
        first, last = work.item_page_indptr[[0, int(work.num_items[0])]].tolist()
        copied = CopiedPages.of(
            (k_pages, v_pages), slot_positions, work.page_indices, slice(first, last)
        )
        k_pages, v_pages, slot_positions = copied.k_pages, copied.v_pages, copied.slot_positions
        work = replace(work, page_indices=copied.page_indices)
    prepared = prepare(work, PageLayout.of(k_pages, q.shape[1]), rule, slot_positions)
    angles = AngleTable.create(rotation).at(prepared.frame_rows(work))
    memory = page_memory(k_pages), page_memory(v_pages)
    return run_prepared(q, memory, prepared, angles, rule)


def run_prepared(
    q: Float[Tensor, "rows qo_heads head_dim"],
    memory: tuple[Tensor, Tensor],
    prepared: PreparedWork,
    angles: Angles,
    rule: ScoreRule,
) -> AttnState:
    """The states of a prepared work list; ``angles`` are those of its `frame_rows`."""
    capacity = len(prepared.order)
    out = torch.zeros(capacity, *q.shape[1:])
    lse = torch.full(out.shape[:2], -torch.inf)
    if prepared.buckets:
        rotated = rotate_heads(q.index_select(0, torch.from_numpy(prepared.rows)), angles)
        entry_out, entry_lse = run_buckets(rotated, memory, prepared.buckets, rule)
        states = torch.from_numpy(np.flatnonzero(prepared.order >= 0))
        order = torch.from_numpy(prepared.order).index_select(0, states)
        out[states] = entry_out.float().index_select(0, order)
        lse[states] = entry_lse.index_select(0, order)
    return AttnState(out, lse)


def run_buckets(
    rotated: Float[Tensor, "entries qo_heads head_dim"],
    memory: tuple[Tensor, Tensor],
    buckets: tuple[Bucket, ...],
    rule: ScoreRule,
) -> tuple[Float[Tensor, "entries qo_heads head_dim"], Float[Tensor, "entries qo_heads"]]:
    """The state of every padded entry: ``out`` in the dtype of ``rotated``, ``lse`` fp32.

    ``rotated`` holds each entry's query in its item's frame; ``memory`` is `page_memory` of K and
    V."""
    parts, start = [], 0
    for bucket in buckets:
        stop = start + bucket.num_items * bucket.num_rows
        parts.append(_run_bucket(rotated[start:stop], memory, bucket, rule))
        start = stop
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _run_bucket(
    rotated: Tensor, memory: tuple[Tensor, Tensor], bucket: Bucket, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    keys = bucket.keys
    packed = pack_groups(rotated, bucket.num_items, keys.layout.num_kv_heads)
    k, v = keys.read(memory[0]), keys.read(memory[1])
    return unpack_groups(*attend_dense(packed, k, v, rule, keys.bias, keys.blind), bucket.num_rows)


def pack_groups(
    q: Float[Tensor, "items_rows qo_heads head_dim"], items: int, num_kv_heads: int
) -> Float[Tensor, "items kv_heads rows_group head_dim"]:
    """Query heads of a KV head as rows of one product, which reads the keys once for all."""
    _, num_qo_heads, head_dim = q.shape
    grouped = q.view(items, -1, num_kv_heads, num_qo_heads // num_kv_heads, head_dim)
    return grouped.transpose(1, 2).reshape(items, num_kv_heads, -1, head_dim)


def unpack_groups(
    out: Float[Tensor, "items kv_heads rows_group head_dim"],
    lse: Float[Tensor, "items kv_heads rows_group"],
    rows: int,
) -> tuple[Float[Tensor, "items_rows qo_heads head_dim"], Float[Tensor, "items_rows qo_heads"]]:
    """The inverse of `pack_groups` for an output and its lse."""
    items, num_kv_heads, packed, head_dim = out.shape
    group = packed // rows
    out = out.view(items, num_kv_heads, rows, group, head_dim).transpose(1, 2)
    lse = lse.view(items, num_kv_heads, rows, group).transpose(1, 2)
    heads = num_kv_heads * group
    return out.reshape(items * rows, heads, head_dim), lse.reshape(items * rows, heads)


def prepare(
    work: WorkList,
    layout: PageLayout,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> PreparedWork:
    """The buckets of a work list over pages of ``layout``.

    Raises InvalidOption for items of a single KV head, which this path does not batch."""
    lists = _HostLists.read(work, slot_positions)
    if (lists.item_kv_head >= 0).any():
        raise InvalidOption(
            "the CPU path in PyTorch has no per-head items: use implementation='native', or "
            "'reference' without a C compiler"
        )
    order = np.full(work.state_capacity, -1, dtype=np.int64)
    buckets: list[Bucket] = []
    entries: list[IntArray] = [np.zeros(0, np.int64)]
    start = 0
    for items in _bucket_items(lists):
        bucket, entry, real = _prepare_bucket(items, lists, layout, rule)
        buckets.append(bucket)
        entries.append(entry.reshape(-1))
        order[lists.entry_state[entry[real]]] = start + np.flatnonzero(real)
        start += entry.size
    entry = np.concatenate(entries)
    return PreparedWork(tuple(buckets), lists.entry_row[entry], lists.entry_offset[entry], order)


@dataclass(frozen=True)
class _HostLists:
    """The work list as int64 numpy arrays without unused capacity."""

    item_page_indptr: IntArray
    item_entry_indptr: IntArray
    item_kv_head: IntArray
    item_explicit: IntArray
    pages: IntArray
    page_positions: IntArray
    entry_row: IntArray
    entry_offset: IntArray
    entry_bound: IntArray
    entry_mask: IntArray
    entry_state: IntArray
    mask_words: IntArray
    row_positions: IntArray
    slot_positions: IntArray | None

    @classmethod
    def read(cls, work: WorkList, slot_positions: Tensor | None) -> "_HostLists":
        def host(tensor: Tensor) -> IntArray:
            return tensor.numpy().astype(np.int64)

        n = int(work.num_items[0])
        return cls(
            host(work.item_page_indptr)[: n + 1],
            host(work.item_entry_indptr)[: n + 1],
            host(work.item_kv_head)[:n],
            host(work.item_explicit)[:n],
            host(work.page_indices),
            host(work.page_positions),
            host(work.entry_row),
            host(work.entry_offset),
            host(work.entry_bound),
            host(work.entry_mask),
            host(work.entry_state),
            host(work.mask_words),
            host(work.row_positions),
            None if slot_positions is None else host(slot_positions),
        )


def _bucket_items(lists: _HostLists) -> list[IntArray]:
    """Groups items of similar size while padding costs less than another bucket."""
    pages = np.diff(lists.item_page_indptr)
    rows = np.diff(lists.item_entry_indptr)
    live = np.flatnonzero((pages > 0) & (rows > 0))
    live = live[np.lexsort((-pages[live], -rows[live]))]
    buckets: list[list[int]] = []
    num_rows = num_pages = padding = 0
    for item in live.tolist():
        needed = int(pages[item] * rows[item])
        padded_pages = max(num_pages, int(pages[item]))
        # cells of padding for this item, and for the others if the bucket grows
        added = num_rows * padded_pages - needed
        added += (padded_pages - num_pages) * num_rows * len(buckets[-1]) if buckets else 0
        if buckets and padding + added <= _MAX_PADDING:
            buckets[-1].append(item)
            padding += added
            num_pages = padded_pages
        else:
            buckets.append([item])
            num_rows, num_pages, padding = int(rows[item]), int(pages[item]), 0
    return [np.array(bucket) for bucket in buckets]


def _prepare_bucket(
    items: IntArray, lists: _HostLists, layout: PageLayout, rule: ScoreRule
) -> tuple[Bucket, IntArray, BoolArray]:
    """A bucket, its padded entries ``[items, rows]``, and a mask of the real ones."""
    first, count = lists.item_page_indptr[items], np.diff(lists.item_page_indptr)[items]
    column = np.arange(count.max())
    real_page = column < count[:, None]  # [items, pages]
    # padding repeats the item's first page, which is finite, and hides it
    cell = np.where(real_page, first[:, None] + column, first[:, None])
    key_positions = _key_positions(cell, real_page, items, lists, layout.page_size)
    entry_first = lists.item_entry_indptr[items]
    entry_count = np.diff(lists.item_entry_indptr)[items]
    entry_column = np.arange(entry_count.max())
    real = entry_column < entry_count[:, None]
    entry = np.where(real, entry_first[:, None] + entry_column, entry_first[:, None])
    rows, offsets = lists.entry_row[entry], lists.entry_offset[entry]
    frame_rows = lists.row_positions[rows] - offsets  # [items, rows], the query's frame position
    visible = _visible(key_positions, frame_rows, entry, lists, rule)
    distance = (
        frame_rows[..., None] - key_positions[:, None] if rule.alibi_slopes is not None else None
    )
    bias, blind = visibility_bias(visible, distance, layout.group, rule)
    keys = KeyBlock.create(lists.pages[cell], layout, key_positions.shape[1], bias, blind)
    return Bucket(len(items), len(entry_column), keys), entry, real


def _key_positions(
    cell: IntArray, real_page: BoolArray, items: IntArray, lists: _HostLists, page_size: int
) -> IntArray:
    """Frame position of every slot of every item, -1 for none: ``[items, slots]``."""
    positions = lists.page_positions[cell][..., None] + np.arange(page_size)
    explicit = lists.item_explicit[items] > 0
    if explicit.any():
        if lists.slot_positions is None:
            raise InvalidOption("a work list with explicit items needs slot_positions")
        positions[explicit] = lists.slot_positions[lists.pages[cell[explicit]]]
    positions[~real_page] = -1
    return positions.reshape(len(items), -1)


def _visible(
    key_positions: IntArray,
    frame_rows: IntArray,
    entry: IntArray,
    lists: _HostLists,
    rule: ScoreRule,
) -> BoolArray:
    """Visibility of slots for each padded row: ``[items, rows, slots]``."""
    keys = key_positions[:, None]
    visible: BoolArray = (keys >= 0) & (keys < lists.entry_bound[entry][..., None])
    if rule.window:
        visible &= frame_rows[..., None] - keys < rule.window
    masks = lists.entry_mask[entry]
    if (masks >= 0).any():
        word = np.maximum(masks, 0)[..., None] + np.maximum(keys, 0) // 32
        bits = lists.mask_words[np.minimum(word, len(lists.mask_words) - 1)]
        hidden = (bits >> (np.maximum(keys, 0) % 32)) & 1
        visible &= ~((masks[..., None] >= 0) & (hidden > 0))
    return visible
