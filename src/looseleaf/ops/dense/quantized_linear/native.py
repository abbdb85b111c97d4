"""Quantized products in C: a matrix in the layout of `products.c`, and calls by address.

The first use of a format and dtype compiles a library. Activations are rounded to 8 bits per 32
values.
"""

import copy
import ctypes
from functools import cache

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from looseleaf.errors import InvalidOption, NativeUnavailable
from looseleaf.ops.dense.quantized_linear.formats import CHUNK, MXFP4_SCALES, BlockFormat
from looseleaf.ops.native.c_compiler import processor_features
from looseleaf.ops.native.native_build import load_library, read_source

GROUP = 32
"""Rows that the packed layout keeps side by side."""

_LINE = 64
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# sums have one order in every copy of a loop
_FLAGS = ("-ffp-contract=off",)
INSTRUCTIONS = {"plain": 0, "avx2": 1, "avx-vnni": 2, "avx512-vnni": 3, "avx512-bf16": 4}
"""Instruction sets of the kernels; plain C runs everywhere."""
_FEATURES = {
    "avx512-bf16": {"avx512_bf16", "avx512_vnni", "avx512bw"},
    "avx512-vnni": {"avx512_vnni", "avx512bw"},
    "avx-vnni": {"avx_vnni", "avx2", "fma"},
    "avx2": {"avx2", "fma", "f16c"},
}


@cache
def supported_instructions() -> tuple[str, ...]:
    """The instruction sets of this processor, fastest first."""
    features = set(processor_features().split())
    return (*(name for name, needs in _FEATURES.items() if needs <= features), "plain")


@cache
def beats_packed_bfloat16() -> bool:
    """Whether these products by a BF16 matrix are at least as fast as PyTorch's packed ones.

    PyTorch uses AMX tiles, and processors without AVX2 have no vectors for ours."""
    has_tiles = bool({"amx_bf16", "amx_tile"} & set(processor_features().split()))
    return "avx2" in supported_instructions() and not has_tiles


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
    )


class _Added(ctypes.Structure):
    _fields_ = (
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("residual_row", ctypes.c_int64),
    )


@cache
def load_products(layout: BlockFormat, dtype: torch.dtype, instructions: str) -> ctypes.CDLL:
    """The library for a format and the dtype of activations.

    Raises NativeUnavailable for another dtype or without a compiler."""
    if dtype not in _DTYPES:
        raise NativeUnavailable(f"no C kernels for activations of {dtype}: use 32 or 16 bits")
    defines = {
        "FORMAT": layout.number,
        "BITS": layout.bits,
        "ZERO": layout.zero,
        "SUB": layout.sub,
        "SUPER": layout.block // CHUNK,
        "HAS_MIN": int(layout.has_min),
        "BLOCK_BYTES": layout.block_bytes,
        "ROW_TYPE": _DTYPES[dtype],
        "INSTRUCTIONS": INSTRUCTIONS[instructions],
        "LANES": {"avx512-bf16": 16, "avx512-vnni": 16, "avx-vnni": 8, "avx2": 8}.get(
            instructions, 4
        ),
    }
    folder = "dense/quantized_linear"
    kernels = ("halves.c",) if layout.bits == 16 else ("pack.c", "codes.c")
    files = (f"{folder}/{name}" for name in ("matrix.h", *kernels, "products.c"))
    source = read_source("looseleaf.ops", "rows.h", *files)
    library = load_library(source, tuple(defines.items()), _FLAGS)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.looseleaf_pack.argtypes = [pointer, number, number, number, pointer]
    library.looseleaf_pack.restype = None
    library.looseleaf_multiply.argtypes = [
        *(pointer, pointer, number, number, pointer, number, pointer, number)
    ]
    library.looseleaf_multiply.restype = ctypes.c_int
    library.looseleaf_rows.argtypes = [pointer, pointer, number, pointer]
    library.looseleaf_rows.restype = None
    return library


def _require_float16_scales(blocks: Tensor, layout: BlockFormat) -> None:
    """Raises NativeUnavailable if a scale of MXFP4 is no float16."""
    exponents = blocks[:, :: layout.block_bytes]
    if exponents.numel() and not (
        int(exponents.min()) in MXFP4_SCALES and int(exponents.max()) in MXFP4_SCALES
    ):
        raise NativeUnavailable(
            "no C kernels for MXFP4 with scales outside of float16's range: they are dequantized"
        )


class PackedMatrix:
    """A matrix ``[features, columns]`` in the C kernels' layout, for activations in ``dtype``.

    ``blocks`` are GGUF's, uint8 ``[features, row_bytes]``, and are copied. The layout takes as many
    bytes as the blocks, 3 % more for Q4_K and Q5_K, 6 % more for MXFP4; features are rounded up to
    a multiple of `GROUP`. ``instructions`` is one of `INSTRUCTIONS`. Raises as `load_products`, and
    NativeUnavailable for scales of MXFP4 that are no float16."""

    def __init__(
        self,
        blocks: UInt8[Tensor, "features row_bytes"],
        layout: BlockFormat,
        dtype: torch.dtype,
        instructions: str | None = None,
    ) -> None:
        self.layout, self.dtype = layout, dtype
        if layout.name == "MXFP4":
            _require_float16_scales(blocks, layout)
        library = load_products(layout, dtype, instructions or supported_instructions()[0])
        self._multiply, self._rows = library.looseleaf_multiply, library.looseleaf_rows
        self.features, row_bytes = blocks.shape
        num_blocks = row_bytes // layout.block_bytes
        self.columns = num_blocks * layout.block
        sub_codes = layout.block // layout.sub if layout.block > CHUNK else 0
        parameter_bytes = num_blocks * GROUP * (1 + layout.has_min) * (2 + sub_codes)
        if layout.bits == 16:
            parameter_bytes = 0
        group_bytes = -(-parameter_bytes // _LINE) * _LINE
        group_bytes += self.columns * GROUP * layout.bits // 8
        blocks = blocks if blocks.stride(1) == 1 else blocks.contiguous()
        self.packed = torch.empty(-(-self.features // GROUP), group_bytes, dtype=torch.uint8)
        library.looseleaf_pack(
            blocks.data_ptr(), self.features, blocks.stride(0), num_blocks, self.packed.data_ptr()
        )
        self._matrix = _Matrix(self.packed.data_ptr(), self.features, num_blocks)
        self._address = ctypes.addressof(self._matrix)

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the C function that multiplies, and of its matrix, valid while this object lives."""
        function = ctypes.cast(self._multiply, ctypes.c_void_p).value
        assert function is not None, "a loaded function has an address"
        return function, self._address

    @property
    def can_gate(self) -> bool:
        """Whether a gated product is possible: both halves are whole groups."""
        return self.features % (2 * GROUP) == 0

    @property
    def device(self) -> torch.device:
        """The device of the matrix, a CPU."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of the packed layout."""
        return self.packed.nbytes

    def part(self, features: slice) -> "PackedMatrix":
        """Neighbouring features, which share this matrix's memory.

        Raises InvalidOption unless the first is a multiple of `GROUP`."""
        if features.start % GROUP:
            raise InvalidOption(f"a part begins at a multiple of {GROUP}, not at {features.start}")
        part = copy.copy(self)
        part.features = features.stop - features.start
        part.packed = self.packed[features.start // GROUP : -(-features.stop // GROUP)]
        part._matrix = _Matrix(part.packed.data_ptr(), part.features, self._matrix.num_blocks)
        part._address = ctypes.addressof(part._matrix)
        return part

    def multiply(
        self,
        x: Float[Tensor, "rows columns"],
        out: Float[Tensor, "rows features"],
        bias: Float[Tensor, " features"] | None = None,
        residual: Float[Tensor, "rows features"] | None = None,
        *,
        gated: bool = False,
    ) -> Tensor:
        """``out = x @ matrix.T + bias + residual``, rounded once; returns ``out``.

        ``gated`` is for a matrix ``[gate, up]`` of twice a multiple of `GROUP` features: ``out =
        silu(x @ gate.T) * (x @ up.T)``. ``bias`` is fp32. Rows of ``out`` and ``residual`` are
        contiguous. Raises InvalidOption for another dtype, shape or device, and MemoryError."""
        rows, features = out.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        expected = self.features // 2 if gated else self.features
        fits = x.shape == (rows, self.columns) and features == expected and out.stride(1) == 1
        fits = fits and x.dtype is out.dtype is self.dtype and x.is_cpu and out.is_cpu
        added = _Added(None, None, 0)
        if gated:
            fits = fits and self.can_gate and bias is residual is None
        if bias is not None:
            added.bias = bias.data_ptr()
            fits = fits and bias.shape == (features,) and bias.dtype is torch.float32
            fits = fits and bias.is_cpu and bias.is_contiguous()
        if residual is not None:
            added.residual, added.residual_row = residual.data_ptr(), residual.stride(0)
            fits = fits and residual.shape == out.shape and residual.stride(1) == 1
            fits = fits and residual.dtype is self.dtype and residual.is_cpu
        if not fits:
            raise InvalidOption(
                f"a product of {self.features} x {self.columns} in {self.dtype} on the CPU can't "
                f"take {x.dtype} {[*x.shape]} and give {out.dtype} {[*out.shape]}, nor add a bias "
                "or residual of another shape or dtype"
            )
        if self._multiply(
            self._address, x.data_ptr(), x.stride(0), rows, out.data_ptr(), out.stride(0),
            ctypes.addressof(added), gated,
        ):  # fmt: skip
            raise MemoryError("no memory for the activations of a quantized product")
        return out

    def rows(self, numbers: Int[Tensor, " rows"]) -> Float[Tensor, "rows columns"]:
        """Rows of the matrix by number, in `dtype`. Raises IndexError for a number out of range."""
        numbers = numbers.to(torch.int64).contiguous()
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.features:
            raise IndexError(f"a row is not among the {self.features} rows of the matrix")
        out = torch.empty(len(numbers), self.columns, dtype=self.dtype)
        self._rows(self._address, numbers.data_ptr(), len(numbers), out.data_ptr())
        return out
