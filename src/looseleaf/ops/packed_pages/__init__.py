"""Lossless compression of bfloat16 pages to 77 % of their bytes.

Exponents of neighbouring numbers differ little: most numbers of a key or value are within 2^14 of
the largest. Four bits therefore encode an exponent as its distance below the largest of its group.
Exponents further below are spilled in full. Sign and mantissa are stored unchanged.

A *block* packs `BLOCK` numbers of a page into `BLOCK_BYTES`, in this order:

- codes of four bits: number *i* in the lower half of byte *i*, number *i + 1,024* in its upper half
- one byte per number for sign and mantissa
- the largest exponent of every `GROUP` numbers, one byte each
- the count of spilled exponents, then each of them with its index, in int32

Code 15 without a spilled exponent means exponent 0, so zeros need no spill. A block with more than
`SPILLED` spilled exponents cannot be packed."""

import torch
from jaxtyping import BFloat16, Int, Num, UInt8
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.packed_pages.layout import BLOCK, BLOCK_BYTES, GROUP, SPILLED
from looseleaf.ops.packed_pages.reference import pack_pages_reference, unpack_pages_reference

__all__ = [
    "BLOCK",
    "GROUP",
    "SPILLED",
    "BLOCK_BYTES",
    "blocks_of",
    "pack_pages",
    "unpack_pages",
]


def blocks_of(kv: Num[Tensor, "layers planes pages kv_heads page_size head_dim"]) -> int:
    """Blocks of the keys of one page in one layer.

    0 if pages cannot be packed: they are not bfloat16, or not a whole number of blocks."""
    numbers = kv[0, 0, 0].numel()
    whole = numbers % BLOCK == 0 and kv.dtype is torch.bfloat16
    return numbers // BLOCK if whole else 0


def pack_pages(
    kv: BFloat16[Tensor, "layers planes pool_pages kv_heads page_size head_dim"],
    pages: Int[Tensor, " pages"],
    length: int,
    packed: UInt8[Tensor, "layers planes blocks block_bytes"],
    spilled: Int[Tensor, " 1"],
    implementation: Implementation = "auto",
) -> None:
    """Packs the first ``length`` tokens of ``pages`` into ``packed``; later slots are packed as
    zeros.

    Sets ``spilled`` to 1 if a block cannot be packed; ``packed`` is then undefined. Raises
    InvalidOption for an unknown ``implementation``."""
    if choose(implementation, kv) == "triton":
        from looseleaf.ops.packed_pages.kernel import pack_pages_triton

        pack_pages_triton(kv, pages, length, packed, spilled)
    else:
        pack_pages_reference(kv, pages, length, packed, spilled)


def unpack_pages(
    packed: UInt8[Tensor, "some planes blocks block_bytes"],
    pages: Int[Tensor, " pages"] | range,
    first_layer: int,
    kv: BFloat16[Tensor, "layers planes pool_pages kv_heads page_size head_dim"],
    implementation: Implementation = "auto",
) -> None:
    """Unpacks the output of `pack_pages` to ``pages`` of the layers from ``first_layer`` on, in
    place.

    Pages with a negative number are skipped. ``packed`` may concatenate the pages of several
    documents. Raises InvalidOption for an unknown ``implementation``."""
    if choose(implementation, kv) == "triton":
        from looseleaf.ops.packed_pages.kernel import unpack_pages_triton

        unpack_pages_triton(packed, pages, first_layer, kv)
    else:
        unpack_pages_reference(packed, torch.as_tensor(pages), first_layer, kv)
