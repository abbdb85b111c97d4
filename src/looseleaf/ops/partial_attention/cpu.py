"""Partial attention on the CPU: items of like shape in one batched product, no loop over pages or
heads.

`prepare` runs once per step, `run_buckets` once per layer. Items are padded to the longest of their
bucket; keys that a row must not see get a bias of -inf. The pool holds finite numbers only, so a
padded slot costs time but never an answer. Answers to `partial_attention_reference`. """

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.flash_cpu import KeyBlock, flash_attention_cpu
from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.ops.rotate.cpu import Turn, make_turn, turn_heads
from looseleaf.types import AttnState, Rotation, ScoreRule

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Bucket:
    """``num_items`` items, padded to ``num_rows`` rows and equal page counts.

    ``row_index`` is None if the rows are all query rows in their order; ``entries`` lists which
    padded (item, row) pairs are real, None if all are. """

    num_items: int
    num_rows: int
    row_index: Tensor | None
    turn: Turn
    keys: KeyBlock
    entries: Tensor | None


@dataclass(frozen=True)
class PreparedWork:
    """A work list as buckets. ``order[state]`` is where a state comes out when buckets are run in
    turn.

    ``merge_index`` ``[rows, states]`` and ``merge_hidden`` are the same for whole rows, padded with
    hidden ones; ``merge_index`` is None if every row has exactly one state, in order. """

    buckets: tuple[Bucket, ...]
    order: Tensor
    merge_index: Tensor | None
    merge_hidden: Tensor | None


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
    _, num_kv_heads, page_size, _ = k_pages.shape
    shape = (q.shape[1], num_kv_heads, page_size)
    prepared = prepare(work, shape, rotation, rule, slot_positions)
    out, lse = run_buckets(q, k_pages, v_pages, prepared, rule)
    return AttnState(
        out.float().index_select(0, prepared.order), lse.index_select(0, prepared.order)
    )


def attend_rows_cpu(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    prepared: PreparedWork,
    rule: ScoreRule,
) -> Float[Tensor, "rows qo_heads head_dim"]:
    """Partial attention and merge, one output a row in the dtype of ``q``."""
    out, lse = run_buckets(q, k_pages, v_pages, prepared, rule)
    if prepared.merge_index is None:
        return out
    rows, states = prepared.merge_index.shape
    flat = prepared.merge_index.view(-1)
    lse = lse.index_select(0, flat).view(rows, states, -1)
    if prepared.merge_hidden is not None:
        lse = lse.masked_fill(prepared.merge_hidden[..., None], -torch.inf)
    # softmax over states is the merge; a row always has a key, its own, so it is never 0 / 0
    weight = lse.softmax(1)[..., None]
    parts = out.index_select(0, flat).view(rows, states, *out.shape[1:])
    return (parts * weight).sum(1).to(q.dtype)


def run_buckets(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    prepared: PreparedWork,
    rule: ScoreRule,
) -> tuple[Float[Tensor, "states qo_heads head_dim"], Float[Tensor, "states qo_heads"]]:
    """All real entries of all buckets, in bucket order: output in the dtype of ``q``, lse fp32."""
    done = [_run_bucket(q, k_pages, v_pages, bucket, rule) for bucket in prepared.buckets]
    if len(done) == 1:
        return done[0]
    return torch.cat([out for out, _ in done]), torch.cat([lse for _, lse in done])


def _run_bucket(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, bucket: Bucket, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    num_qo_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pages.shape[1]
    group = num_qo_heads // num_kv_heads
    items, rows = bucket.num_items, bucket.num_rows
    wanted = q if bucket.row_index is None else q.index_select(0, bucket.row_index)
    turned = turn_heads(wanted, bucket.turn).view(items, rows, num_kv_heads, group, head_dim)
    # query heads that share a KV head become rows of one product: keys are read once for all of
    # them
    packed = turned.transpose(1, 2).reshape(items, num_kv_heads, rows * group, head_dim)
    out, lse = flash_attention_cpu(packed, k_pages, v_pages, bucket.keys, rule)
    out = out.view(items, num_kv_heads, rows, group, head_dim).transpose(1, 2)
    lse = lse.reshape(items, num_kv_heads, rows, group).transpose(1, 2)
    out = out.reshape(items * rows, num_qo_heads, head_dim)
    lse = lse.reshape(items * rows, num_qo_heads)
    if bucket.entries is None:
        return out, lse
    return out.index_select(0, bucket.entries), lse.index_select(0, bucket.entries)


def prepare(
    work: WorkList,
    shape: tuple[int, int, int],
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> PreparedWork:
    """Buckets of a work list for ``shape`` = (query heads, KV heads, page size).

    Raises InvalidOption for items of single KV heads, which the CPU path does not batch.
    """
    lists = _HostLists.read(work, slot_positions)
    if (lists.item_kv_head >= 0).any():
        raise InvalidOption("the CPU path has no per-head items: use implementation='reference'")
    buckets: list[Bucket] = []
    states: list[IntArray] = []
    for items in _bucket_items(lists):
        bucket, written = _prepare_bucket(items, lists, shape, rotation, rule)
        buckets.append(bucket)
        states.append(written)
    place = np.concatenate(states) if states else np.zeros(0, np.int64)
    order = np.empty_like(place)
    order[place] = np.arange(len(place))
    merge_index, hidden = _merge_index(lists.row_state_indptr, order)
    return PreparedWork(tuple(buckets), torch.from_numpy(order), merge_index, hidden)


def _merge_index(indptr: IntArray, order: IntArray) -> tuple[Tensor | None, Tensor | None]:
    counts = np.diff(indptr)
    if (counts == 1).all() and (order == np.arange(len(order))).all():
        return None, None
    width = np.arange(max(1, counts.max(initial=1)))
    hidden = width >= counts[:, None]
    index = order[np.minimum(indptr[:-1, None] + width, len(order) - 1)]
    return torch.from_numpy(index), torch.from_numpy(hidden) if hidden.any() else None


@dataclass(frozen=True)
class _HostLists:
    """The work list as int64 numpy arrays, without the unused capacity."""

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
    row_state_indptr: IntArray
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
            host(work.row_state_indptr),
            None if slot_positions is None else host(slot_positions),
        )


def _bucket_items(lists: _HostLists) -> list[IntArray]:
    """Items of like page and row counts together: padding at most doubles the pages of an item."""
    pages = np.diff(lists.item_page_indptr)
    rows = np.diff(lists.item_entry_indptr)
    live = np.flatnonzero((pages > 0) & (rows > 0))
    # single rows never pad to a group; longest first, so that a bucket's first item sets its width
    live = live[np.lexsort((-pages[live], -np.ceil(np.log2(rows[live]))))]
    buckets: list[list[int]] = []
    for item in live.tolist():
        if buckets:
            first = buckets[-1][0]
            same_rows = np.ceil(np.log2(rows[first])) == np.ceil(np.log2(rows[item]))
            if same_rows and (pages[item] * 2 >= pages[first] or pages[first] <= 8):
                buckets[-1].append(item)
                continue
        buckets.append([item])
    # state order follows item order where it can, so that plain decode needs no permutation
    return [np.sort(np.array(bucket)) for bucket in buckets]


def _prepare_bucket(
    items: IntArray,
    lists: _HostLists,
    shape: tuple[int, int, int],
    rotation: Rotation,
    rule: ScoreRule,
) -> tuple[Bucket, IntArray]:
    num_qo_heads, num_kv_heads, page_size = shape
    first, count = lists.item_page_indptr[items], np.diff(lists.item_page_indptr)[items]
    column = np.arange(count.max())
    real_page = column < count[:, None]  # [items, pages]
    # a padded page repeats the item's first: it is finite, it is this item's own, and it is hidden
    cell = np.where(real_page, first[:, None] + column, first[:, None])
    key_positions = _key_positions(cell, real_page, items, lists, page_size)
    entry_first, entry_count = (
        lists.item_entry_indptr[items],
        np.diff(lists.item_entry_indptr)[items],
    )
    entry_column = np.arange(entry_count.max())
    real_entry = entry_column < entry_count[:, None]
    entry = np.where(real_entry, entry_first[:, None] + entry_column, entry_first[:, None])
    rows, offsets = lists.entry_row[entry], lists.entry_offset[entry]
    frame_rows = (
        lists.row_positions[rows] - offsets
    )  # [items, rows], the query's place in the frame
    visible = _visible(key_positions, frame_rows, entry, lists, rule)
    keys = KeyBlock.create(
        pages=lists.pages[cell],
        visible=visible,
        distance=frame_rows[..., None] - key_positions[:, None]
        if rule.alibi_slopes is not None
        else None,
        group=num_qo_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        rule=rule,
    )
    flat_rows = rows.reshape(-1)
    whole = (
        len(flat_rows) == len(lists.row_positions)
        and (flat_rows == np.arange(len(flat_rows))).all()
    )
    bucket = Bucket(
        num_items=len(items),
        num_rows=len(entry_column),
        row_index=None if whole else torch.from_numpy(flat_rows),
        turn=make_turn(torch.from_numpy(frame_rows.reshape(-1)), rotation),
        keys=keys,
        entries=None if real_entry.all() else torch.from_numpy(np.flatnonzero(real_entry)),
    )
    return bucket, lists.entry_state[entry][real_entry]


def _key_positions(
    cell: IntArray, real_page: BoolArray, items: IntArray, lists: _HostLists, page_size: int
) -> IntArray:
    """Frame position of every slot of every item, -1 where there is no key: ``[items, slots]``."""
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
    """Which slots each padded row may see: ``[items, rows, slots]``."""
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
