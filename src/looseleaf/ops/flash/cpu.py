"""Attention over page runs on the CPU, with the lse; shared by all CPU paths.

PyTorch's CPU flash attention computes the output and the lse. Two cases use two batched products
instead: a soft-cap, which the library lacks, and bf16 decode over many runs, where the library
takes twice as long. A single run of consecutive pages is read in place if the pages of a head are
contiguous. All other runs are gathered first."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.types import ScoreRule

# rows per run up to which two products beat flash attention in bf16
_FEW_ROWS = 64
# rows per block of scores: all scores of a long prompt would take gigabytes
_UNFUSED_ROWS = 128
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PageLayout:
    """Head counts and the memory layout of pages.

    The vectors of (page, KV head) are memory row ``page * page_stride + head * head_stride``. A
    memory row holds ``page_size * head_dim`` numbers."""

    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    page_stride: int
    head_stride: int

    @classmethod
    def of(
        cls, pages: Float[Tensor, "pages kv_heads page_size head_dim"], heads: int
    ) -> "PageLayout":
        """The layout of ``pages`` for ``heads`` query heads."""
        _, num_kv_heads, page_size, head_dim = pages.shape
        row = page_size * head_dim
        strides = pages.stride(0) // row, pages.stride(1) // row
        return cls(heads, num_kv_heads, page_size, *strides)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def rows(self, pages: IntArray) -> Tensor:
        """Memory rows of pages ``[items, pages]``: ``[items, kv_heads, pages]``, flattened."""
        heads = np.arange(self.num_kv_heads)[:, None] * self.head_stride
        return torch.from_numpy((pages[:, None] * self.page_stride + heads).reshape(-1))


def reads_in_place(k_pages: Tensor, v_pages: Tensor) -> bool:
    """Whether `page_memory` is a view of the pages, and one `PageLayout` describes both tensors.

    True for contiguous pages in the order (page, head) or (head, page)."""
    pages, heads, page_size, head_dim = k_pages.shape
    row = page_size * head_dim
    by_page, by_head = (heads * row, row, head_dim, 1), (row, max(pages, 1) * row, head_dim, 1)
    return k_pages.stride() == v_pages.stride() and k_pages.stride() in (by_page, by_head)


@dataclass(frozen=True)
class CopiedPages:
    """Copies of the pages that a list reads, and the list with the copies' indices."""

    k_pages: Tensor
    v_pages: Tensor
    slot_positions: Tensor | None
    page_indices: Tensor

    @classmethod
    def of(
        cls,
        pages: tuple[Tensor, Tensor],
        slot_positions: Tensor | None,
        page_indices: Tensor,
        run: slice,
    ) -> "CopiedPages":
        """Copies each page of ``page_indices[run]`` once."""
        numbers, ordinals = page_indices[run].long().unique(return_inverse=True)
        new_indices = page_indices.clone()
        new_indices[run] = ordinals.to(new_indices.dtype)
        k_pages, v_pages = (side.index_select(0, numbers).contiguous() for side in pages)
        positions = None if slot_positions is None else slot_positions.index_select(0, numbers)
        return cls(k_pages, v_pages, positions, new_indices)


def page_memory(
    pages: Float[Tensor, "pages kv_heads page_size head_dim"],
) -> Float[Tensor, "1 outer slots head_dim"]:
    """A view of ``pages`` in memory order: outer is the KV head if a head's pages are contiguous,
    else the page. `reads_in_place` must be true."""
    memory = pages.transpose(0, 1) if pages.stride(0) <= pages.stride(1) else pages
    outer, inner, page_size, head_dim = memory.shape
    return memory.reshape(1, outer, inner * page_size, head_dim)


@dataclass(frozen=True)
class KeyBlock:
    """Page runs of equal length for some items, with the visibility of their keys.

    ``first_slot`` is set for one run of consecutive pages, which is read in place. Otherwise
    ``rows`` lists memory rows ``[items, kv_heads, pages]``, flattened. ``bias`` is added to the
    scores and broadcasts to ``[items, heads, rows, keys]``; None if all keys are visible. ``blind``
    marks rows without a visible key, ``[items, 1, rows]``; None if every row has one."""

    num_items: int
    num_keys: int
    layout: PageLayout
    first_slot: int | None
    rows: Tensor | None
    bias: Tensor | None = None
    blind: Tensor | None = None

    @classmethod
    def create(
        cls,
        pages: IntArray,
        layout: PageLayout,
        num_keys: int,
        bias: Tensor | None = None,
        blind: Tensor | None = None,
    ) -> "KeyBlock":
        """The first ``num_keys`` keys of each run in ``pages`` ``[items, pages]``."""
        items = len(pages)
        if items == 1 and layout.page_stride == 1 and (pages[0, 1:] - pages[0, :-1] == 1).all():
            first = int(pages[0, 0]) * layout.page_size
            return cls(items, num_keys, layout, first, None, bias, blind)
        return cls(items, num_keys, layout, None, layout.rows(pages), bias, blind)

    def read(
        self, memory: Float[Tensor, "1 outer slots head_dim"]
    ) -> Float[Tensor, "items kv_heads keys head_dim"]:
        """The keys or values of every run, from `page_memory`; a view where possible."""
        if self.rows is None:
            assert self.first_slot is not None
            return memory.narrow(2, self.first_slot, self.num_keys)
        head_dim = memory.shape[-1]
        row = self.layout.page_size * head_dim
        gathered = memory.view(-1, row).index_select(0, self.rows)
        runs = gathered.view(self.num_items, self.layout.num_kv_heads, -1, head_dim)
        return runs.narrow(2, 0, self.num_keys)


def visibility_bias(
    visible: BoolArray, distance: IntArray | None, group: int, rule: ScoreRule
) -> tuple[Tensor | None, Tensor | None]:
    """``bias`` and ``blind`` of a `KeyBlock` from visibility ``[items, rows, keys]``.

    Each row is repeated for ``group`` query heads. ALiBi slopes need ``distance``, query position
    minus key position."""
    blind_rows = ~visible.any(-1)
    blind = None
    if blind_rows.any():
        blind = torch.from_numpy(np.repeat(blind_rows, group, axis=1))[:, None]
    if rule.alibi_slopes is not None and distance is not None:
        items, rows, keys = visible.shape
        slopes = rule.alibi_slopes.view(-1, 1, group, 1)
        bias = -slopes * torch.from_numpy(distance)[:, None, :, None].float()
        bias.masked_fill_(torch.from_numpy(~visible)[:, None, :, None], -torch.inf)
        return bias.reshape(items, -1, rows * group, keys), blind
    if visible.all():
        return None, blind
    if visible.shape[1] > 1 and (visible == visible[:, :1]).all():
        visible = visible[:, :1]
    if visible.shape[1] > 1:
        visible = np.repeat(visible, group, axis=1)
    hidden = torch.from_numpy(~visible)
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None], blind


def attend_dense(
    q: Float[Tensor, "items heads rows head_dim"],
    k: Float[Tensor, "items kv_heads keys head_dim"],
    v: Float[Tensor, "items kv_heads keys head_dim"],
    rule: ScoreRule,
    bias: Tensor | None = None,
    blind: Tensor | None = None,
    causal: bool = False,
) -> tuple[Float[Tensor, "items heads rows head_dim"], Float[Tensor, "items heads rows"]]:
    """Attention and its lse; ``q`` is in the frame of the keys.

    With ``causal``, which excludes a bias, row i sees keys 0 to i. The output has the dtype of
    ``q``, the lse is fp32. Rows without a visible key get ``(0, -inf)``."""
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    many_runs = q.dtype is torch.bfloat16 and q.shape[0] > 1 and q.shape[2] <= _FEW_ROWS
    if rule.soft_cap or many_runs:
        out, lse = _attend_in_blocks(q, k, v, rule, bias, blind, causal)
    else:
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=rule.softmax_scale
        )
    if blind is not None:
        # PyTorch returns (0, 0) for a row without keys; the unit of the merge is (0, -inf)
        lse = lse.masked_fill(blind, -torch.inf)
        out = out.masked_fill(blind[..., None], 0.0)
    return out, lse


def _attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: ScoreRule,
    bias: Tensor | None,
    blind: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    group, rows = q.shape[1] // k.shape[1], q.shape[2]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if rows <= _UNFUSED_ROWS:
        return _attend_unfused(q, k, v, rule, bias, blind, 0 if causal else None)
    parts = []
    for start in range(0, rows, _UNFUSED_ROWS):
        block = slice(start, start + _UNFUSED_ROWS)
        # a bias of one row broadcasts to all rows
        block_bias = bias if bias is None or bias.shape[2] == 1 else bias[:, :, block]
        block_blind = blind if blind is None or blind.shape[2] == 1 else blind[:, :, block]
        # causal rows of this block see no key after their last row
        end = min(start + _UNFUSED_ROWS, k.shape[2]) if causal else k.shape[2]
        visible = k[:, :, :end], v[:, :, :end]
        first = start if causal else None
        parts.append(
            _attend_unfused(q[:, :, block], *visible, rule, block_bias, block_blind, first)
        )
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _attend_unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: ScoreRule,
    bias: Tensor | None,
    blind: Tensor | None,
    causal_from: int | None,
) -> tuple[Tensor, Tensor]:
    """Attention by two products, with a KV head for each query head; row i sees keys up to
    ``causal_from + i``, or all."""
    products = torch.matmul(q, k.transpose(-1, -2))
    if bias is not None and not rule.soft_cap:
        # one operation casts to fp32, scales and adds the bias
        scores = torch.add(bias, products, alpha=rule.softmax_scale)
    else:
        scores = products.float().mul_(rule.softmax_scale)
        if rule.soft_cap:
            scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        if bias is not None:
            scores = scores + bias
    if causal_from is not None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + causal_from)
        scores = scores.masked_fill(later, -torch.inf)
    weights = scores.softmax(-1)
    if blind is not None:
        # bf16 products by AMX tiles spread a NaN from one row to its neighbours
        weights = weights.masked_fill(blind[..., None], 0.0)
    # the largest weight is exp(its score - lse); the caller masks rows without keys
    lse = scores.amax(-1) - weights.amax(-1).log()
    return torch.matmul(weights.to(v.dtype), v).to(q.dtype), lse
