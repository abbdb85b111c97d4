"""The work list on the CPU in C: tensors in, tensors out, no copies.

`native.c` also stores and merges, so that a layer costs one call; the three phases answer to
`store_kv`, `partial_attention` and `merge_states`. A `NativePlan` holds what stays the same in all
layers of a step; a call adds one layer's tensors.
"""

import ctypes
import math
from collections.abc import Iterable
from enum import IntFlag
from importlib import resources

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption, NativeUnavailable
from looseleaf.ops.native_build import load_library, vector_lanes
from looseleaf.ops.page_dtypes import FP8
from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.types import AttnState, Rotation, ScoreRule

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
    "num_states",
    "num_kv_heads",
    "window",
    "slot_positions_stride",
)
_TENSORS = ("q", "k", "v", "k_pages", "v_pages", "out")
_STRIDES = (
    *("q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "out_row"),
    *("k_page", "k_page_head", "v_page", "v_page_head"),
)


class Phase(IntFlag):
    """What a call does, in this order."""

    STORE = 1
    PARTIAL = 2
    MERGE = 4


def _fields(names: Iterable[str], kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


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
    """The kernels for the shape and dtype of ``pages``, compiled if that was never done.

    ``row_dtype`` is that of queries, keys and values as they come: that of the pages, or any float
    if those are e4m3. Raises NativeUnavailable if they can't be compiled.
    """
    _, num_kv_heads, page_size, head_dim = pages.shape
    row_dtype = row_dtype or pages.dtype
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
        "INTERLEAVED": int(rotation.interleaved),
        "ROW_TYPE": _DTYPES[row_dtype],
        "KV_TYPE": _DTYPES[pages.dtype],
        "LANES": math.gcd(head_dim, vector_lanes()),
    }
    source = resources.files("looseleaf.ops.partial_attention").joinpath("native.c").read_text()
    return load_library(source, tuple(defines.items()))


def partial_attention_native(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    work: WorkList,
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> AttnState:
    """See `looseleaf.ops.partial_attention`."""
    if q.dtype is not k_pages.dtype and k_pages.dtype is not FP8:
        raise InvalidOption(f"queries are {q.dtype} and pages {k_pages.dtype}: make them the same")
    plan = NativePlan(
        rotation, rule, q.shape[1], k_pages, work=work, slot_positions=slot_positions,
        row_dtype=q.dtype,
    )  # fmt: skip
    plan.point_pages(k_pages, v_pages)
    plan.run(Phase.PARTIAL, q if q.stride(-1) == 1 else q.contiguous())
    return plan.states


class NativePlan:
    """A step's lists as the C kernels read them; keeps the tensors alive that it points to.

    ``work`` is None if no row decodes. The lists may be written to between calls: that is how a
    decode loop goes on. Raises InvalidOption for tensors that are not on the CPU, and for explicit
    items without ``slot_positions`` (int32 ``[pages, page_size]``); NativeUnavailable as
    `load_attention` does.
    """

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
        num_kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
        library = load_attention(k_pages, num_qo_heads, rotation, row_dtype)
        self._attention = library.looseleaf_attention
        self._attention.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._attention.restype = None
        capacity = 0 if work is None else work.state_capacity
        state_out = torch.empty(capacity, num_qo_heads, head_dim)
        self.states = AttnState(state_out, torch.empty(capacity, num_qo_heads))
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
        plan = _Plan(
            num_decode_rows=0 if work is None else len(work.row_positions),
            num_states=capacity,
            num_kv_heads=num_kv_heads,
            window=rule.window,
            softmax_scale=rule.softmax_scale,
            soft_cap=rule.soft_cap,
            slot_positions_stride=0 if slot_positions is None else slot_positions.stride(0),
        )
        for name, tensor in tensors.items():
            if tensor is not None:
                assert tensor.stride(-1) == 1 or tensor.numel() <= 1, f"{name} has gaps"
                setattr(plan, name, tensor.data_ptr())
        self._plan, self._tensors = plan, _Tensors()
        self._pointers = ctypes.addressof(plan), ctypes.addressof(self._tensors)

    def point_rows(
        self, slots: Int[Tensor, " rows"], frame_positions: Int[Tensor, " rows"]
    ) -> None:
        """Where the next calls store their rows: int64 ``[rows]``, flat slots and positions in the
        frame."""
        slots, frame_positions = slots.contiguous(), frame_positions.contiguous()
        self._rows = slots, frame_positions
        self._plan.slots, self._plan.frame_positions = slots.data_ptr(), frame_positions.data_ptr()
        self._plan.num_rows = len(slots)

    def point_pages(
        self,
        k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
        v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    ) -> None:
        """Which layer's pages the next calls read and write."""
        tensors = self._tensors
        tensors.k_pages, tensors.v_pages = k_pages.data_ptr(), v_pages.data_ptr()
        tensors.k_page, tensors.k_page_head = k_pages.stride(0), k_pages.stride(1)
        tensors.v_page, tensors.v_page_head = v_pages.stride(0), v_pages.stride(1)

    def run(
        self,
        phases: Phase,
        q: Float[Tensor, "rows qo_heads head_dim"] | None = None,
        kv: tuple[Tensor, Tensor] | None = None,
        out: Float[Tensor, "rows qo_heads head_dim"] | None = None,
    ) -> None:
        """``phases`` for one layer: ``kv`` are unrotated keys and values of all rows to store,
        ``q`` the queries of (at least) the rows that decode, ``out`` where their merged output
        goes."""
        tensors = self._tensors
        if q is not None:
            tensors.q = q.data_ptr()
            tensors.q_row, tensors.q_head, _ = q.stride()
        if kv is not None:
            k, v = kv
            tensors.k, tensors.v = k.data_ptr(), v.data_ptr()
            tensors.k_row, tensors.k_head, _ = k.stride()
            tensors.v_row, tensors.v_head, _ = v.stride()
        if out is not None:
            tensors.out, tensors.out_row = out.data_ptr(), out.stride(0)
        self._attention(*self._pointers, int(phases))
