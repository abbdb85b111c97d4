"""The equations of `looseleaf.ops.dense.quantized_linear`: values of blocks, and their product.

The layouts of blocks are those of GGUF (ggml's type traits and the ``gguf`` package's numpy code
state them).
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from looseleaf.ops.dense.quantized_linear.formats import MXFP4_CODES, BlockFormat


def dequantize_reference(
    blocks: UInt8[Tensor, "rows row_bytes"], layout: BlockFormat
) -> Float[Tensor, "rows columns"]:
    """The values of ``blocks``, fp32."""
    rows, row_bytes = blocks.shape
    if layout.bits == 16:
        dtype = torch.bfloat16 if layout.name == "BF16" else torch.float16
        return blocks.contiguous().view(dtype).float()
    flat = blocks.reshape(rows * (row_bytes // layout.block_bytes), layout.block_bytes)
    scales, mins = _parameters(flat, layout)
    codes = block_codes(flat, layout).float().unflatten(1, (-1, layout.sub)) - layout.zero
    values: Tensor = scales[:, :, None] * codes
    if mins is not None:
        values += mins[:, :, None]
    return values.reshape(rows, -1)


def quantized_linear_reference(
    x: Float[Tensor, "rows inner"], blocks: UInt8[Tensor, "features row_bytes"], layout: BlockFormat
) -> Float[Tensor, "rows features"]:
    """The product with the values of ``blocks``, in fp32."""
    return functional.linear(x.float(), dequantize_reference(blocks, layout))


def _halves(flat: Tensor, start: int) -> Tensor:
    """float16 numbers ``[blocks, 1]`` at byte ``start`` of each block, in fp32."""
    return flat[:, start : start + 2].contiguous().view(torch.float16).float()


def _parameters(flat: Tensor, layout: BlockFormat) -> tuple[Tensor, Tensor | None]:
    """Scales and mins ``[blocks, sub-blocks]``."""
    if layout.name == "MXFP4":
        exponents = flat[:, :1].int()
        # half of the scale, since codes are twice the floats
        scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 128)
        return scales.masked_fill(exponents == 255, torch.nan), None
    if layout.block == layout.sub:
        return _halves(flat, 0), _halves(flat, 2) if layout.has_min else None
    scale_codes, min_codes = sub_codes(flat, layout)
    if min_codes is None:
        return _halves(flat, 208) * scale_codes.float(), None
    return _halves(flat, 0) * scale_codes.float(), -(_halves(flat, 2) * min_codes.float())


def sub_codes(flat: Tensor, layout: BlockFormat) -> tuple[Tensor, Tensor | None]:
    """Codes of scales and mins ``[blocks, sub-blocks]`` of Q4_K, Q5_K and Q6_K."""
    if layout.name == "Q6_K":
        return flat[:, 192:208].view(torch.int8), None
    # 16 codes of 6 bits: four scales, four mins, then the low halves of the others
    first, second, low = flat[:, 4:8], flat[:, 8:12], flat[:, 12:16]
    scale_codes = torch.cat([first & 63, (low & 15) | (first >> 6) << 4], 1)
    min_codes = torch.cat([second & 63, (low >> 4) | (second >> 6) << 4], 1)
    return scale_codes, min_codes


def block_codes(flat: Tensor, layout: BlockFormat) -> Tensor:
    """Codes ``[blocks, values]`` from 0."""
    if layout.name == "Q8_0":
        return torch.bitwise_xor(flat[:, 2:], 128)
    if layout.name == "Q6_K":
        pairs = flat[:, 128:192].unflatten(1, (2, 1, 32)) >> _shifts(2, flat) & 3
        return torch.bitwise_or(_nibbles(flat[:, :128], 64), pairs.flatten(1) << 4)
    is_flat = layout.block == layout.sub
    width = 16 if is_flat else 32
    low = _nibbles(flat[:, -layout.block // 2 :], width)
    if layout.name == "MXFP4":
        return torch.tensor(MXFP4_CODES, dtype=torch.uint8, device=flat.device)[low.long()]
    if layout.bits == 4:
        return low
    start = layout.block_bytes - 20 if is_flat else 16
    upper = flat[:, start : start + layout.block // 8].unsqueeze(-1 if is_flat else 1)
    shifts = _shifts(1, flat)
    bits = upper >> (shifts.flatten() if is_flat else shifts) & 1
    return torch.bitwise_or(low, bits.flatten(1) << 4)


def _nibbles(packed: Tensor, width: int) -> Tensor:
    """The low halves of each ``width`` bytes, then the high ones."""
    groups = packed.unflatten(1, (-1, width))
    return torch.stack([groups & 15, groups >> 4], 2).flatten(1)


def _shifts(size: int, like: Tensor) -> Tensor:
    """Shifts ``[steps, 1]`` through a byte."""
    return torch.arange(0, 8, size, device=like.device, dtype=torch.uint8)[:, None]
