"""The work list on the CPU in C, without copies of tensors.

`native.c` also stores keys and merges states, so that a layer costs one call. Its phases are
defined by `store_kv`, `partial_attention` and `merge_states`. A `NativePlan` holds the lists of a
step; a call adds the tensors of a layer."""

import ctypes
import math
from collections.abc import Iterable
from enum import IntFlag
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption, NativeUnavailable
from looseleaf.ops.native.c_compiler import vector_lanes
from looseleaf.ops.native.native_build import load_library, read_source
from looseleaf.ops.page_dtypes import FP8
from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.types import AttentionCall, AttnState, Rotation, ScoreRule

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, FP8: 3}
_LISTS = (
    "num_items",
    "item_page_indptr",
    "item_entry_indptr",
    "item_kv_head",
    "item_explicit",
    "page_indices",
    "page_positions",
    "entry_row",
    "entry_offset",
    "entry_bound",
    "entry_mask",
    "entry_state",
    "mask_words",
    "row_positions",
    "row_state_indptr",
)
_ROWS = ("slots", "frame_positions")
_FLOATS = ("cos", "sin", "slopes", "state_out", "state_lse")
_SIZES = (
    "num_rows",
    "num_decode_rows",
    "num_positions",
    "num_states",
    "num_kv_heads",
    "window",
    "slot_positions_stride",
    *("num_angles", "item_capacity", "page_capacity", "entry_capacity", "num_mask_words"),
)
_TENSORS = ("q", "k", "v", "k_pages", "v_pages", "out", "sinks")
_STRIDES = (
    *("q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "out_row"),
    *("k_page", "k_page_head", "v_page", "v_page_head"),
    *("num_queries", "num_pages"),
)
# messages of the C enum Fault
_FAULTS = (
    "",
    "num_items, item_page_indptr or item_entry_indptr exceed the length of the lists",
    "a page is not in the pool",
    "a row has no query or no position",
    "a state is not below the number of states",
    "a position is outside the rotation table: make the table longer",
)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidOption(message)


class Phase(IntFlag):
    """Phases of a call, in their order."""

    STORE = 1
    PARTIAL = 2
    MERGE = 4


class PageAddresses(NamedTuple):
    """A layer's pages for the kernels: addresses, and strides of pages and heads in elements."""

    k_pages: int
    v_pages: int
    k_page: int
    k_page_head: int
    v_page: int
    v_page_head: int
    num_pages: int


def _fields(names: Iterable[str], kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


# fused products are explicit in the source: the compiler might fuse one copy of a loop only
_FLAGS = ("-ffp-contract=off",)


class _Plan(ctypes.Structure):
    _fields_ = (
        _fields([*_LISTS, "slot_positions", *_ROWS, *_FLOATS], ctypes.c_void_p)
        + _fields(_SIZES, ctypes.c_int64)
        + _fields(("softmax_scale", "soft_cap"), ctypes.c_float)
    )


class _Tensors(ctypes.Structure):
    _fields_ = _fields(_TENSORS, ctypes.c_void_p) + _fields(_STRIDES, ctypes.c_int64)


def load_attention(
    pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    num_qo_heads: int,
    rotation: Rotation,
    row_dtype: torch.dtype | None = None,
) -> ctypes.CDLL:
    """The kernels for the shape and dtype of ``pages``, from the cache or compiled.

    ``row_dtype`` is the dtype of queries, new keys and values: that of the pages, or any float for
    e4m3 pages. Raises NativeUnavailable for other dtypes or without a compiler, and InvalidOption
    for heads that do not divide."""
    _, num_kv_heads, page_size, head_dim = pages.shape
    row_dtype = row_dtype or pages.dtype
    _require(
        num_qo_heads % num_kv_heads == 0 and num_qo_heads > 0,
        f"{num_qo_heads} query heads can't be shared out among {num_kv_heads} KV heads: use a "
        "multiple",
    )
    _require(
        rotation.rotary_dim <= head_dim,
        f"a rotation of {rotation.rotary_dim} dims needs larger heads than {head_dim} dims",
    )
    fits = row_dtype in _DTYPES and row_dtype is not FP8 and pages.dtype in (row_dtype, FP8)
    if not fits:
        raise NativeUnavailable(
            f"no C kernels for {row_dtype} over pages of {pages.dtype}: use floats of 32 or 16 "
            "bits, over pages of the same or of e4m3"
        )
    defines = {
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotation.rotary_dim,
        "GROUP": num_qo_heads // num_kv_heads,
        "PAGE_SIZE": page_size,
        "SLOT": pages.stride(2),
        "INTERLEAVED": int(rotation.interleaved),
        "ROW_TYPE": _DTYPES[row_dtype],
        "KV_TYPE": _DTYPES[pages.dtype],
        "LANES": math.gcd(head_dim, vector_lanes()),
    }
    source = read_source("looseleaf.ops", "rows.h", "partial_attention/native.c")
    return load_library(source, tuple(defines.items()), _FLAGS)


def partial_attention_native(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    work: WorkList,
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> AttnState:
    """See `looseleaf.ops.partial_attention`. Repeated calls with the same lists, as in the layers
    of a model, keep a `NativePlan` instead."""
    if q.dtype is not k_pages.dtype and k_pages.dtype is not FP8:
        raise InvalidOption(f"queries are {q.dtype} and pages {k_pages.dtype}: make them the same")
    plan = NativePlan(
        rotation, rule, q.shape[1], k_pages, work=work, slot_positions=slot_positions,
        row_dtype=q.dtype,
    )  # fmt: skip
    pages = plan.find_pages(k_pages, v_pages)
    plan.run(Phase.PARTIAL, q if q.stride(-1) == 1 else q.contiguous(), pages=pages)
    return plan.states


class NativePlan:
    """A step's lists for the C kernels; keeps the tensors alive that it points to.

    ``work`` is None if no row decodes. The lists may be updated between calls, as in a decode loop.
    The kernels read memory by address, so the plan checks its tensors. It raises InvalidOption for
    tensors off the CPU, of another dtype or shape, or with gaps, and for explicit items without
    ``slot_positions`` (int32 ``[pages, page_size]``). `run` raises InvalidOption for a page, row,
    state or position outside its tensor. NativeUnavailable as in `load_attention`."""

    def __init__(
        self,
        rotation: Rotation,
        rule: ScoreRule,
        num_qo_heads: int,
        k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
        *,
        work: WorkList | None = None,
        slot_positions: Int[Tensor, "pages page_size"] | None = None,
        row_dtype: torch.dtype | None = None,
    ) -> None:
        if (
            work is not None
            and slot_positions is None
            and work.item_explicit[: work.num_items[0]].any()
        ):
            raise InvalidOption("a work list with explicit items needs slot_positions")
        if k_pages.device.type != "cpu":
            raise InvalidOption("the C kernels work on the CPU only: use implementation='triton'")
        num_kv_heads, page_size, head_dim = k_pages.shape[1:]
        library = load_attention(k_pages, num_qo_heads, rotation, row_dtype)
        self._attention = library.looseleaf_attention
        self._attention.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._attention.restype = ctypes.c_int
        # layouts that the kernels are compiled for: sizes, last strides, dtype, is_cpu
        row_dtype, slot = row_dtype or k_pages.dtype, k_pages.stride(2)
        self._page_layout = num_kv_heads, page_size, head_dim, slot, 1, k_pages.dtype, True
        self._q_layout = num_qo_heads, head_dim, 1, row_dtype, True
        self._kv_layout = num_kv_heads, head_dim, 1, row_dtype, True
        capacity = 0 if work is None else work.state_capacity
        state_out = torch.empty(capacity, num_qo_heads, head_dim)
        self.states = AttnState(state_out, torch.empty(capacity, num_qo_heads))
        self._plan, self._tensors = _Plan(**_sizes(work, rotation, rule)), _Tensors()
        self._plan.num_kv_heads = num_kv_heads
        if slot_positions is not None:
            _require_list("slot_positions", slot_positions, rows=True)
            _require(
                slot_positions.shape[1] == page_size,
                f"slot_positions are of {slot_positions.shape[1]} slots a page, not {page_size}",
            )
            self._plan.slot_positions_stride = slot_positions.stride(0)
        self._max_pages = 2**62 if slot_positions is None else len(slot_positions)
        _require_floats(rotation, rule, num_qo_heads)
        tensors = {
            "cos": rotation.cos,
            "sin": rotation.sin,
            "slopes": rule.alibi_slopes,
            "slot_positions": slot_positions,
            "state_out": self.states.out,
            "state_lse": self.states.lse,
        }
        if work is not None:
            tensors |= {name: getattr(work, name) for name in _LISTS}
        self._alive = list(tensors.values())
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(self._plan, name, tensor.data_ptr())
        self._pointers = ctypes.addressof(self._plan), ctypes.addressof(self._tensors)

    def point_rows(
        self, slots: Int[Tensor, " rows"], frame_positions: Int[Tensor, " rows"]
    ) -> None:
        """Sets the destination of the next calls' rows: flat slots and frame positions, int64
        ``[rows]``.

        Raises InvalidOption for another dtype or different lengths."""
        slots, frame_positions = slots.contiguous(), frame_positions.contiguous()
        _require(
            slots.dtype is frame_positions.dtype is torch.int64
            and slots.shape == frame_positions.shape,
            f"slots and positions in the frame are int64, one a row, not {slots.dtype} and "
            f"{frame_positions.dtype}, {len(slots)} and {len(frame_positions)}",
        )
        self._rows = slots, frame_positions
        self._plan.slots, self._plan.frame_positions = slots.data_ptr(), frame_positions.data_ptr()
        self._plan.num_rows = len(slots)

    def find_pages(
        self,
        k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
        v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    ) -> PageAddresses:
        """Addresses of a layer's pages, valid while the tensors live.

        K and V have one shape, contiguous dims, and the slot stride of the plan's pages. Raises
        InvalidOption otherwise."""
        shape = pages, heads, page_size, head_dim = k_pages.shape
        k_page, k_head, slot, step = k_pages.stride()
        layout = heads, page_size, head_dim, slot, step, k_pages.dtype, k_pages.is_cpu
        v_page, v_head, v_slot, v_step = v_pages.stride()
        v_fits = v_pages.shape == shape and v_slot == slot and v_step == 1 and v_pages.is_cpu
        k_fits = layout == self._page_layout and v_pages.dtype is k_pages.dtype
        if not (k_fits and v_fits and pages <= self._max_pages):
            limit = "" if pages <= self._max_pages else f" {self._max_pages} at most:"
            raise _layout_error(f"pages of K and V,{limit}", self._page_layout, k_pages, v_pages)
        return PageAddresses(
            k_pages.data_ptr(), v_pages.data_ptr(), k_page, k_head, v_page, v_head, pages
        )

    def run(
        self,
        phases: Phase,
        q: Float[Tensor, "rows qo_heads head_dim"] | None = None,
        kv: tuple[Tensor, Tensor] | None = None,
        out: Float[Tensor, "rows qo_heads head_dim"] | None = None,
        pages: PageAddresses | None = None,
        sinks: Float[Tensor, " qo_heads"] | None = None,
    ) -> None:
        """Runs ``phases`` for one layer, over ``pages`` or those of the call before.

        ``kv`` are unrotated keys and values of all rows to store. ``q`` holds at least the rows
        that decode, and ``out`` receives their merged output, with ``sinks`` (fp32) as one more
        state of each row (`looseleaf.ops.add_sinks`). Raises InvalidOption for tensors in
        another layout, and for indices outside their tensors."""
        tensors, plan = self._tensors, self._plan
        if pages is not None:
            (
                tensors.k_pages, tensors.v_pages, tensors.k_page, tensors.k_page_head,
                tensors.v_page, tensors.v_page_head, tensors.num_pages,
            ) = pages  # fmt: skip
        if q is not None:
            rows, heads, head_dim = q.shape
            tensors.q_row, tensors.q_head, step = q.stride()
            if (heads, head_dim, step, q.dtype, q.is_cpu) != self._q_layout:
                raise _layout_error("q,", self._q_layout, q)
            tensors.q, tensors.num_queries = q.data_ptr(), rows
        if kv is not None:
            k, v = kv
            shape = rows, heads, head_dim = k.shape
            tensors.k_row, tensors.k_head, step = k.stride()
            tensors.v_row, tensors.v_head, v_step = v.stride()
            k_fits = (heads, head_dim, step, k.dtype, k.is_cpu) == self._kv_layout
            v_fits = v.shape == shape and v_step == 1 and v.dtype is k.dtype and v.is_cpu
            if not (k_fits and v_fits and rows >= plan.num_rows):
                raise _layout_error(f"k and v, {plan.num_rows} rows:", self._kv_layout, k, v)
            tensors.k, tensors.v = k.data_ptr(), v.data_ptr()
        if out is not None:
            rows, heads, head_dim = out.shape
            tensors.out_row, head, step = out.stride()
            k_fits = (heads, head_dim, step, out.dtype, out.is_cpu) == self._q_layout
            if not (k_fits and head == head_dim and rows >= plan.num_decode_rows):
                raise _layout_error(f"out, {plan.num_decode_rows} dense rows:", self._q_layout, out)
            tensors.out = out.data_ptr()
            tensors.sinks = 0 if sinks is None else self._address_of(sinks, heads)
        if fault := self._attention(*self._pointers, int(phases)):
            self.require(fault)

    def call(
        self,
        phases: Phase,
        q: Float[Tensor, "rows qo_heads head_dim"],
        kv: tuple[Tensor, Tensor],
        out: Float[Tensor, "rows qo_heads head_dim"],
        pages: PageAddresses,
        sinks: Float[Tensor, " qo_heads"] | None,
    ) -> AttentionCall:
        """`run` as a call for other C code, valid while this plan and the tensors live."""
        # no phase: only addresses and strides are written
        self.run(Phase(0), q, kv, out, pages, sinks)
        function = ctypes.cast(self._attention, ctypes.c_void_p).value
        assert function is not None, "a loaded function has an address"
        tensors = _Tensors.from_buffer_copy(self._tensors)
        return AttentionCall(function, self._plan, tensors, int(phases))

    @staticmethod
    def require(fault: int) -> None:
        """Raises InvalidOption unless ``fault``, the result of a call, is 0."""
        if fault:
            raise InvalidOption(f"the lists of attention are invalid: {_FAULTS[fault]}")

    def _address_of(self, sinks: Tensor, heads: int) -> int:
        layout = heads, 1, torch.float32, True
        if (*sinks.shape, *sinks.stride(), sinks.dtype, sinks.is_cpu) != layout:
            raise _layout_error("sinks,", layout, sinks)
        return sinks.data_ptr()


def _layout_error(subject: str, layout: tuple[object, ...], *tensors: Tensor) -> InvalidOption:
    """The error for tensors in another layout than the kernels'."""
    expected = " ".join(str(size) for size in layout[:-1])
    actual = ", ".join(
        f"{x.dtype} {[*x.shape]} strides {x.stride()} on {x.device}" for x in tensors
    )
    return InvalidOption(
        f"{subject} must have the sizes, last strides and dtype {expected} on the CPU, not {actual}"
    )


def _require_list(name: str, x: Tensor, *, rows: bool = False) -> None:
    """Raises InvalidOption unless ``x`` is int32, contiguous and on the CPU."""
    dense = x.stride(-1) == 1 or x.numel() <= 1
    _require(
        x.dtype is torch.int32 and x.is_cpu and dense and x.dim() == 1 + rows,
        f"{name} is {x.dtype} on the {x.device.type}, strides {x.stride()}: the kernels read int32 "
        "on the CPU without gaps",
    )


def _require_floats(rotation: Rotation, rule: ScoreRule, num_qo_heads: int) -> None:
    cos, sin, slopes = rotation.cos, rotation.sin, rule.alibi_slopes
    for name, x in (("cos", cos), ("sin", sin), ("alibi_slopes", slopes)):
        _require(
            x is None or (x.dtype is torch.float32 and x.is_cpu and x.is_contiguous()),
            f"{name} must be float32 on the CPU without gaps",
        )
    _require(cos.shape == sin.shape, "cos and sin must be of one shape")
    _require(
        slopes is None or len(slopes) == num_qo_heads,
        f"alibi_slopes must be {num_qo_heads}, one a query head",
    )


def _sizes(work: WorkList | None, rotation: Rotation, rule: ScoreRule) -> dict[str, float]:
    """Scalars of a plan: the rule, the rotation table and the lengths of the lists."""
    sizes: dict[str, float] = {
        "window": rule.window,
        "softmax_scale": rule.softmax_scale,
        "soft_cap": rule.soft_cap,
        "num_angles": len(rotation.cos),
    }
    if work is None:
        return sizes
    lists = {name: getattr(work, name) for name in _LISTS}
    for name, tensor in lists.items():
        _require_list(name, tensor)
    length = {name: len(tensor) for name, tensor in lists.items()}
    items = [length[name] for name in _LISTS if name.startswith("item_")]
    items[:2] = [length["item_page_indptr"] - 1, length["item_entry_indptr"] - 1]
    return sizes | {
        "num_decode_rows": min(length["row_positions"], length["row_state_indptr"] - 1),
        "num_positions": length["row_positions"],
        "num_states": work.state_capacity,
        "item_capacity": max(0, min(items)),
        "page_capacity": min(length["page_indices"], length["page_positions"]),
        "entry_capacity": min(n for name, n in length.items() if name.startswith("entry_")),
        "num_mask_words": length["mask_words"],
    }
