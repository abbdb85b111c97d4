"""The experts of a layer in C: one call, where Python takes ten calls for each expert."""

import ctypes
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dense.quantized_linear.native import GROUP, PackedMatrix
from looseleaf.ops.experts.route import Routes
from looseleaf.ops.native.c_compiler import vector_lanes
from looseleaf.ops.native.native_build import load_library, read_source

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Stacked(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("multiply", "packed")),
        *((name, ctypes.c_int64) for name in ("bytes", "outputs", "num_blocks")),
    )


class _Sizes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("rows", "slots", "experts", "hidden", "inner", "x_row")
    )


@cache
def _load_experts(dtype: torch.dtype) -> Any:
    defines = (("ROW_TYPE", _DTYPES[dtype]), ("LANES", vector_lanes()))
    source = read_source("looseleaf.ops", "rows.h", "experts/mlp/experts.c")
    experts = load_library(source, defines, ("-ffp-contract=off",)).looseleaf_experts
    experts.argtypes = [ctypes.c_void_p] * 7
    experts.restype = ctypes.c_int
    return experts


def can_sum(gate_up: PackedMatrix, down: PackedMatrix, num_experts: int) -> bool:
    """Whether each expert has whole groups of the packed layout, in both halves of its gate."""
    gates, outputs = gate_up.features // num_experts, down.features // num_experts
    return gates % (2 * GROUP) == outputs % GROUP == 0


def expert_mlp_native(
    x: Float[Tensor, "rows hidden"],
    gate_up: PackedMatrix,
    down: PackedMatrix,
    routes: Routes,
) -> Float[Tensor, "rows hidden"]:
    """The sum over a row's experts of ``weight * down(silu(gate) * up)``, rounded once.

    ``gate_up`` and ``down`` have the matrices of all experts one below the other, and `can_sum`.
    Raises InvalidOption for tensors that don't fit, and MemoryError."""
    (rows, hidden), inner = x.shape, down.columns
    num_experts = down.features // max(hidden, 1)
    experts, weights = routes.experts.contiguous(), routes.weights.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    fits = x.dtype is gate_up.dtype is down.dtype and gate_up.columns == hidden
    fits = fits and gate_up.features == 2 * inner * num_experts and x.is_cpu
    fits = fits and experts.dtype is torch.int32 and weights.dtype is torch.float32
    if not (fits and can_sum(gate_up, down, num_experts)):
        raise InvalidOption(
            f"experts of {gate_up.features} x {gate_up.columns} and {down.features} x "
            f"{down.columns} in {down.dtype} can't take {x.dtype} {[*x.shape]} on {x.device}"
        )
    out = torch.empty((rows, hidden), dtype=x.dtype)
    sizes = _Sizes(rows, experts.shape[1], num_experts, hidden, inner, x.stride(0))
    stacked = [_stacked(matrix, num_experts) for matrix in (gate_up, down)]
    failed = _load_experts(x.dtype)(
        *map(ctypes.addressof, (*stacked, sizes)),
        *(tensor.data_ptr() for tensor in (x, experts, weights, out)),
    )
    if failed:
        raise MemoryError("no memory for the activations of experts")
    return out


def _stacked(matrix: PackedMatrix, num_experts: int) -> _Stacked:
    part, packed = matrix.features // num_experts, matrix.packed
    return _Stacked(
        multiply=matrix.addresses[0],
        packed=packed.data_ptr(),
        bytes=part // GROUP * packed.stride(0),
        outputs=part,
        num_blocks=matrix.columns // matrix.layout.block,
    )
