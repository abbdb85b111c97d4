"""Packing as its definition: an exponent is a distance from its group's largest, or a spill."""

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from looseleaf.ops.packed_pages.layout import (
    BLOCK,
    COUNT_AT,
    GROUP,
    LOW_AT,
    SPILLED,
    TOPS_AT,
)

_FAR = 15


def pack_pages_reference(
    kv: Tensor,
    pages: Int[Tensor, " pages"],
    length: int,
    packed: UInt8[Tensor, "layers planes blocks block_bytes"],
    spilled: Int[Tensor, " 1"],
) -> None:
    """See `looseleaf.ops.packed_pages`."""
    numbers = kv[:, :, pages].view(torch.int16)
    slots = torch.arange(len(pages) * kv.shape[4], device=kv.device).view(len(pages), 1, -1, 1)
    numbers = numbers.masked_fill(slots >= length, 0)
    bits = numbers.reshape(*packed.shape[:3], BLOCK).int() & 0xFFFF
    exponent = bits >> 7 & 0xFF
    groups = exponent.unflatten(-1, (-1, GROUP))
    tops = groups.amax(-1)
    code = (tops[..., None] - groups).clamp(max=_FAR).flatten(-2)
    packed[..., :LOW_AT] = code[..., : BLOCK // 2] | code[..., BLOCK // 2 :] << 4
    packed[..., LOW_AT:TOPS_AT] = bits >> 8 & 0x80 | bits & 0x7F
    packed[..., TOPS_AT:COUNT_AT] = tops
    is_spilled = (code == _FAR) & (exponent > 0)
    rank = is_spilled.cumsum(-1) - 1
    words = packed[..., COUNT_AT:].contiguous().view(torch.int32).zero_()
    words[..., 0] = is_spilled.sum(-1).clamp(max=SPILLED)
    *block, index = torch.nonzero(is_spilled & (rank < SPILLED), as_tuple=True)
    position = (*block, index)
    words[(*block, 1 + rank[position])] = exponent[position] << 11 | index.int()
    packed[..., COUNT_AT:] = words.view(torch.uint8)
    spilled |= (is_spilled.sum(-1) > SPILLED).any().to(spilled.dtype)


def unpack_pages_reference(
    packed: UInt8[Tensor, "some planes blocks block_bytes"],
    pages: Int[Tensor, " pages"],
    first_layer: int,
    kv: Tensor,
) -> None:
    """See `looseleaf.ops.packed_pages`."""
    numbers = _unpack_blocks(packed).view(*packed.shape[:2], len(pages), *kv.shape[3:])
    is_page = pages >= 0
    kv[first_layer : first_layer + len(packed), :, pages[is_page]] = numbers[:, :, is_page].to(
        kv.dtype
    )


def _unpack_blocks(packed: UInt8[Tensor, "layers planes blocks block_bytes"]) -> Tensor:
    """The numbers of all blocks, ``[layers, planes, blocks, BLOCK]``."""
    halves, low = packed[..., :LOW_AT].int(), packed[..., LOW_AT:TOPS_AT].int()
    tops = packed[..., TOPS_AT:COUNT_AT].int().repeat_interleave(GROUP, -1)
    code = torch.cat((halves & 15, halves >> 4), -1)
    exponent = torch.where(code == _FAR, 0, tops - code)
    words = packed[..., COUNT_AT:].contiguous().view(torch.int32)
    count = words[..., :1].clamp(0, SPILLED)
    *block, rank = torch.nonzero(torch.arange(SPILLED, device=words.device) < count, as_tuple=True)
    word = words[(*block, 1 + rank)]
    exponent[(*block, word & 0x7FF)] = word >> 11
    bits = (low & 0x80) << 8 | (exponent & 0xFF) << 7 | low & 0x7F
    return bits.to(torch.int16).view(torch.bfloat16)
