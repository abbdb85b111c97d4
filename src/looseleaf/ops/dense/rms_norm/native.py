"""The RMS norm in C, for the rows of a CPU: one call where PyTorch's norm takes ten."""

import ctypes
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.errors import InvalidOption, NativeUnavailable
from looseleaf.ops.native.c_compiler import vector_lanes
from looseleaf.ops.native.native_build import load_library, read_source

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLAGS = ("-ffp-contract=off",)


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("rows", "heads", "features", "x_row", "x_head", "delta_row")
    )


@cache
def load_norm_library(dtype: torch.dtype) -> ctypes.CDLL:
    """The C library of norms, and of products in a chain, for rows of ``dtype``.

    Raises NativeUnavailable for another dtype than fp32, bf16 and fp16, or without a compiler."""
    if dtype not in _DTYPES:
        raise NativeUnavailable(f"no C norm for rows of {dtype}: use 32 or 16 bits")
    defines = (("ROW_TYPE", _DTYPES[dtype]), ("LANES", vector_lanes()))
    files = ("rows.h", "dense/rms_norm/norm.c", "dense/product_chain/chain.c")
    return load_library(read_source("looseleaf.ops", *files), defines, _FLAGS)


@cache
def load_norm(dtype: torch.dtype) -> Any:
    """The C norm for rows of ``dtype``. Raises NativeUnavailable as `load_norm_library`."""
    norm = load_norm_library(dtype).looseleaf_rms_norm
    pointer = ctypes.c_void_p
    norm.argtypes = [*[pointer] * 4, ctypes.c_int64, pointer, ctypes.c_float]
    norm.restype = None
    return norm


def has_native_norm(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `rms_norm_native` supports rows of ``dtype`` on ``device`` on this machine."""
    try:
        return device.type == "cpu" and load_norm(dtype) is not None
    except NativeUnavailable:
        return False


def rms_norm_native(
    x: Float[Tensor, "rows *heads features"],
    weight: Float[Tensor, " features"],
    eps: float,
    delta: Float[Tensor, "rows features"] | None = None,
) -> Float[Tensor, "rows *heads features"]:
    """See `looseleaf.ops.dense.rms_norm`; ``x`` may have a dim of heads, without ``delta``.

    Raises InvalidOption for tensors of another dtype, shape or device, and NativeUnavailable as
    `load_norm`."""
    norm, wide = load_norm(x.dtype), weight.dtype is torch.float32
    heads, features = (x.shape[1] if x.ndim == 3 else 1), x.shape[-1]
    fits = (wide or weight.dtype is x.dtype) and weight.shape == (features,)
    fits = fits and x.is_cpu and weight.is_cpu and x.stride(-1) == 1 and weight.is_contiguous()
    shape = _Shape(x.shape[0], heads, features, x.stride(0), x.stride(1) if x.ndim == 3 else 0, 0)
    address = None
    if delta is not None:
        address, shape.delta_row = delta.data_ptr(), delta.stride(0)
        fits = fits and delta.shape == x.shape and delta.dtype is x.dtype and delta.is_cpu
        fits = fits and delta.stride(-1) == 1
    if not fits:
        raise InvalidOption(
            f"the C norm can't take rows {[*x.shape]} of {x.dtype} with a weight "
            f"{[*weight.shape]} of {weight.dtype}: make rows contiguous, on the CPU, in one dtype"
        )
    out = torch.empty(x.shape, dtype=x.dtype)
    norm(
        ctypes.addressof(shape), x.data_ptr(), address, weight.data_ptr(), wide, out.data_ptr(), eps
    )
    return out
