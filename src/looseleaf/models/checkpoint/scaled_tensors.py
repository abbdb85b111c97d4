"""Matrices that a checkpoint stores as codes and scales: FP8, compressed-tensors, AWQ and GPTQ.

The tensors beside a module's name say its form, so modules that a recipe left out need no list. The
layouts are those of the formats' own tools: compressed-tensors, AutoAWQ (GEMM) and GPTQ (v1, v2).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.config import Quantization
from looseleaf.errors import CorruptCheckpoint, UnsupportedModel
from looseleaf.models.checkpoint.header import TensorEntry
from looseleaf.ops.dense.scaled_linear import TILE, Codes, ScaledMatrix, pack_pairs

Read = Callable[[str], Tensor]
"""The tensor of a name, on the CPU."""

UNUSED = ("input_scale", "weight_shape", "g_idx", "weight_g_idx", "k_scale", "v_scale")
"""Tensors beside a module that its values don't need."""

# place of each 4-bit code of an AWQ word among its eight outputs
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class StoredMatrix:
    """A module's codes ``[features, columns]``: its form, and its tensors with their shapes."""

    module: str
    form: str
    bits: int
    features: int
    columns: int
    tensors: Mapping[str, tuple[int, ...]]

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return [f"{self.module}.{suffix}" for suffix in self.tensors]


def find_stored(
    quantization: Quantization | None,
    entries: Mapping[str, TensorEntry],
    name: str,
    shape: tuple[int, int],
) -> StoredMatrix | None:
    """The stored form of the matrix ``name`` (``….weight``); None for a plain matrix.

    Raises CorruptCheckpoint for tensors that don't fit ``shape`` or each other."""
    if quantization is None:
        return None
    module, (features, columns) = name.removesuffix(".weight"), shape
    tensors = {
        suffix: entries[f"{module}.{suffix}"]
        for suffix in _SUFFIXES
        if f"{module}.{suffix}" in entries
    }
    if "qweight" in tensors:
        awq = quantization.method == "awq"
        width = features if awq else columns
        words = tensors["qweight"].shape[1 if awq else 0]
        bits = _bits(module, words, width)
        needed = ["qweight", "qzeros", "scales"]
        return _stored(module, "awq" if awq else "gptq", bits, shape, tensors, needed)
    if "weight_packed" in tensors:
        bits = _bits(module, tensors["weight_packed"].shape[-1], columns)
        return _stored(module, "packed", bits, shape, tensors, ["weight_packed", "weight_scale"])
    scale = next((s for s in ("weight_scale_inv", "weight_scale") if s in tensors), None)
    if scale is None or "weight" not in tensors or tensors["weight"].dtype not in _BYTES:
        return None
    return _stored(module, tensors["weight"].dtype, 8, shape, tensors, ["weight", scale])


_SUFFIXES = (
    "weight", "weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point",
    "weight_g_idx", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
_BYTES = ("F8_E4M3", "I8")


def _stored(
    module: str,
    form: str,
    bits: int,
    shape: tuple[int, int],
    tensors: Mapping[str, TensorEntry],
    needed: list[str],
) -> StoredMatrix:
    missing = [suffix for suffix in needed if suffix not in tensors]
    if missing:
        raise CorruptCheckpoint(f"{module} lacks {module}.{missing[0]}; download it again")
    suffixes = needed + [s for s in ("weight_zero_point", "g_idx", "weight_g_idx") if s in tensors]
    stored = StoredMatrix(
        module, form, bits, *shape, {suffix: tensors[suffix].shape for suffix in suffixes}
    )
    _check_shapes(stored, shape)
    return stored


def _check_shapes(stored: StoredMatrix, shape: tuple[int, int]) -> None:
    features, columns = shape
    words = 32 // stored.bits
    expected = {
        "weight": shape,
        "weight_packed": (features, columns // words),
        "qweight": (columns, features // words)
        if stored.form == "awq"
        else (columns // words, features),
    }
    for suffix, size in expected.items():
        if suffix in stored.tensors and stored.tensors[suffix] != size:
            raise CorruptCheckpoint(
                f"{stored.module}.{suffix} has shape {list(stored.tensors[suffix])}, config.json "
                f"asks for {list(size)}; config.json and the weights do not fit together"
            )


def _bits(module: str, words: int, width: int) -> int:
    for bits in (4, 8):
        if words * 32 == bits * width:
            return bits
    raise UnsupportedModel(
        f"{module} packs {width} codes into {words} words: 4 and 8 bits are supported"
    )


def decode(stored: StoredMatrix, quantization: Quantization, read: Read) -> ScaledMatrix:
    """The codes and scales of a stored matrix. Raises UnsupportedModel and CorruptCheckpoint."""

    def tensor(suffix: str) -> Tensor:
        return read(f"{stored.module}.{suffix}")

    if stored.form in _BYTES:
        name = "weight_scale_inv" if "weight_scale_inv" in stored.tensors else "weight_scale"
        kind: Codes = "fp8" if stored.form == "F8_E4M3" else "int8"
        scales = _scales_per_row(stored, tensor(name).float())
        return ScaledMatrix(kind, tensor("weight"), scales)
    _require_plain_order(stored, tensor)
    if stored.form == "packed":
        # codes are offset by half of their range, zeros too
        codes = _unpack(tensor("weight_packed"), stored.bits)
        half = float(1 << (stored.bits - 1))
        scales = _scales_per_row(stored, tensor("weight_scale").float())
        if "weight_zero_point" in stored.tensors:
            zeros = _unpack(tensor("weight_zero_point").t(), stored.bits).t().float()
            zeros = zeros[: stored.features]
        else:
            zeros = torch.full_like(scales, half)
        return _coded(stored, codes, scales, zeros)
    scales = tensor("scales").t().float()
    if stored.form == "awq":
        order = torch.tensor(_AWQ_ORDER) if stored.bits == 4 else torch.arange(32 // stored.bits)
        codes, zeros = (
            _unpack(tensor(name), stored.bits).unflatten(1, (-1, len(order)))[..., order].flatten(1)
            for name in ("qweight", "qzeros")
        )
        return _coded(stored, codes.t(), scales, zeros.t().float())
    codes = _unpack(tensor("qweight").t(), stored.bits)
    zeros = _unpack(tensor("qzeros"), stored.bits).t().float()
    # the first version of the format stores a zero minus 1
    return _coded(stored, codes, scales, zeros + (quantization.version != "gptq_v2"))


def _require_plain_order(stored: StoredMatrix, tensor: Callable[[str], Tensor]) -> None:
    for suffix in ("g_idx", "weight_g_idx"):
        if suffix not in stored.tensors:
            continue
        index = tensor(suffix)
        scale = stored.tensors.get("scales") or stored.tensors["weight_scale"][::-1]
        group = stored.columns // scale[0]
        if not torch.equal(index.long(), torch.arange(len(index)) // group):
            raise UnsupportedModel(
                f"{stored.module}.{suffix} reorders columns (desc_act or actorder): take a "
                "checkpoint without it"
            )


def _coded(stored: StoredMatrix, codes: Tensor, scales: Tensor, zeros: Tensor) -> ScaledMatrix:
    if zeros.shape != scales.shape:
        raise CorruptCheckpoint(
            f"{stored.module} has scales {list(scales.shape)} and zeros {list(zeros.shape)}; "
            "download it again"
        )
    scales, zeros = scales.contiguous(), zeros.contiguous()
    if stored.bits == 8 or stored.columns % TILE:
        # pairs need whole tiles, so other 4-bit codes take a byte
        half = 128 if stored.bits == 8 else 0
        centered = (codes.short() - half).to(torch.int8).contiguous()
        return ScaledMatrix("int8", centered, scales, zeros - half)
    return ScaledMatrix("int4", pack_pairs(codes), scales, zeros)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Codes ``[rows, columns]`` as uint8 of int32 words ``[rows, columns * bits / 32]``."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2).to(torch.uint8)


def _scales_per_row(stored: StoredMatrix, scales: Tensor) -> Tensor:
    """Scales ``[features, groups]`` of scales by tensor, output, group or block."""
    features, columns = stored.features, stored.columns
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(features, 1).contiguous()
    if scales.ndim == 1:
        scales = scales[:, None]
    rows, groups = scales.shape
    if rows != features:
        # by blocks of outputs, of which the last may be cut
        block = _block(features, rows)
        scales = scales.repeat_interleave(block, 0)[:features]
    if groups < 1 or columns % groups or scales.shape[0] != features:
        raise UnsupportedModel(
            f"{stored.module} has {list(stored.tensors.values())} as shapes, whose scales do not "
            "divide its columns evenly"
        )
    return scales.contiguous()


def _block(features: int, rows: int) -> int:
    """Outputs of a block: 128, or an even share."""
    return 128 if -(-features // 128) == rows else -(-features // rows)
