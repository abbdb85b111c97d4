"""Products with quantized matrices in one call, with the norms before them and the sums after them.

A layer of a small model takes some ten microseconds a product, as long as Python takes for a call.
The results are bit for bit those of `rms_norm_native` and `PackedMatrix.multiply`.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dense.quantized_linear import PackedMatrix
from looseleaf.ops.dense.rms_norm.native import load_norm_library
from looseleaf.types import AttentionCall


@dataclass(frozen=True)
class Stage:
    """A product: ``output[:, column:] = norm(input) @ matrix.T + bias + residual``.

    ``input``, ``output`` and ``residual`` are numbers of buffers; ``norm`` is the weight of an RMS
    norm, ``bias`` is fp32. ``output`` may be ``residual``, not ``input``. ``gated`` as in
    `PackedMatrix.multiply`."""

    matrix: PackedMatrix
    input: int
    output: int
    residual: int | None = None
    norm: Tensor | None = None
    bias: Tensor | None = None
    column: int = 0
    gated: bool = False

    @property
    def width(self) -> int:
        """Number of outputs."""
        return self.matrix.features // 2 if self.gated else self.matrix.features


class _Stage(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("multiply", "matrix", "bias", "norm")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("norm_is_wide", "features", "input", "residual", "output"),
                *("column", "gated"),
            )
        ),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_void_p), ("stride", ctypes.c_int64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention", "plan", "tensors")),
        *((name, ctypes.c_int64) for name in ("phases", "first", "count")),
    )


class _Turns(ctypes.Structure):
    _fields_ = (("input", ctypes.c_int64), ("output", ctypes.c_int64), ("other", _Buffer))


@cache
def _load_chain(dtype: torch.dtype) -> tuple[Any, Any]:
    """The functions of stages, and of layers with their attention."""
    library = load_norm_library(dtype)
    chain, layers = library.looseleaf_chain, library.looseleaf_layers
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    chain.argtypes = [pointer, number, pointer, number, ctypes.c_float]
    layers.argtypes = [pointer, number, pointer, pointer, pointer, number, ctypes.c_float]
    chain.restype = layers.restype = ctypes.c_int
    return chain, layers


class ProductChain:
    """``stages`` over buffers of the ``widths``, in the dtype of their matrices, on a CPU.

    Raises InvalidOption for stages that do not fit the buffers, and NativeUnavailable without a C
    compiler."""

    def __init__(self, stages: Sequence[Stage], widths: Sequence[int], eps: float) -> None:
        self.dtype = stages[0].matrix.dtype
        self._chain, self._layers = _load_chain(self.dtype)
        self._eps, self._widths = eps, tuple(widths)
        for stage in stages:
            _check(stage, self._widths, self.dtype)
        self._stages = (_Stage * len(stages))(*map(_fields, stages))
        self._kept = tuple(stages)
        self._buffers = _Buffer * len(widths)

    def run(self, start: int, stop: int, buffers: Sequence[Tensor | None]) -> None:
        """Runs the stages from ``start`` to ``stop`` over ``buffers``, ``[rows, width]`` each.

        A buffer that no stage uses may be None. Raises InvalidOption for buffers of another dtype
        or shape, and MemoryError."""
        addresses, rows = self._addresses(buffers)
        stages = ctypes.addressof(self._stages[start])
        if self._chain(stages, stop - start, ctypes.addressof(addresses), rows, self._eps):
            raise MemoryError("no memory for the activations of quantized products")

    def run_layers(
        self,
        calls: Sequence[AttentionCall],
        stages: Sequence[tuple[int, int]],
        buffers: Sequence[Tensor | None],
        turns: tuple[int, int, Tensor],
    ) -> int:
        """Runs layers, each of them an attention and the stages from a start to a stop.

        ``turns`` has the numbers of the buffers of a layer's input and output, and a second output:
        a layer's output is the next layer's input. Returns the fault of an attention that failed,
        or 0. Raises as `run`."""
        addresses, rows = self._addresses(buffers)
        source, target, other = turns
        layers = (_Layer * len(calls))(*map(_layer, calls, stages))
        second = _Turns(source, target, _Buffer(other.data_ptr(), other.stride(0)))
        fault: int = self._layers(
            ctypes.addressof(layers), len(calls), ctypes.addressof(self._stages),
            ctypes.addressof(addresses), ctypes.addressof(second), rows, self._eps,
        )  # fmt: skip
        if fault == 1:
            raise MemoryError("no memory for the activations of quantized products")
        return max(0, fault - 1)

    def _addresses(self, buffers: Sequence[Tensor | None]) -> tuple[ctypes.Array[_Buffer], int]:
        """The addresses of ``buffers``, and their number of rows."""
        addresses, rows = self._buffers(), None
        for buffer, width, address in zip(buffers, self._widths, addresses, strict=True):
            if buffer is None:
                continue
            if rows is None:
                rows = buffer.shape[0]
            stride, step = buffer.stride()
            fits = buffer.shape == (rows, width) and buffer.dtype is self.dtype and buffer.is_cpu
            if not (fits and step == 1):
                raise InvalidOption(
                    f"a chain of products needs rows {rows} x {width} in {self.dtype} without gaps "
                    f"on the CPU, not {[*buffer.shape]} in {buffer.dtype}"
                )
            address.rows, address.stride = buffer.data_ptr(), stride
        return addresses, rows or 0


def _layer(call: AttentionCall, stages: tuple[int, int]) -> _Layer:
    first, stop = stages
    plan, tensors = ctypes.addressof(call.plan), ctypes.addressof(call.tensors)
    return _Layer(call.function, plan, tensors, call.phases, first, stop - first)


def _check(stage: Stage, widths: Sequence[int], dtype: torch.dtype) -> None:
    matrix, norm, bias = stage.matrix, stage.norm, stage.bias
    fits = matrix.dtype is dtype and widths[stage.input] == matrix.columns
    fits = fits and stage.column + stage.width <= widths[stage.output]
    fits = fits and stage.output != stage.input and (not stage.gated or matrix.can_gate)
    if stage.residual is not None:
        fits = fits and widths[stage.residual] == stage.width and stage.column == 0
    if norm is not None:
        fits = fits and norm.dtype in (dtype, torch.float32) and norm.shape == (matrix.columns,)
        fits = fits and norm.is_cpu and norm.is_contiguous()
    if bias is not None:
        fits = fits and bias.dtype is torch.float32 and bias.shape == (stage.width,)
        fits = fits and bias.is_cpu and bias.is_contiguous() and not stage.gated
    if not fits:
        raise InvalidOption(f"a stage of a chain of products does not fit its buffers: {stage}")


def _fields(stage: Stage) -> _Stage:
    norm, bias = stage.norm, stage.bias
    multiply, matrix = stage.matrix.addresses
    return _Stage(
        multiply=multiply,
        matrix=matrix,
        bias=None if bias is None else bias.data_ptr(),
        norm=None if norm is None else norm.data_ptr(),
        norm_is_wide=norm is not None and norm.dtype is torch.float32,
        features=stage.matrix.columns,
        input=stage.input,
        residual=-1 if stage.residual is None else stage.residual,
        output=stage.output,
        column=stage.column,
        gated=stage.gated,
    )
