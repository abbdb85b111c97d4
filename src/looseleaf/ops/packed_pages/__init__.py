"""Pages of bfloat16 in three quarters of their bytes, and back, without losing a bit.

The exponents of numbers that stand together differ little: a row of keys or values has most of its
numbers within 2^14 of the largest. So four bits say how far below the largest of its group an
exponent is, and the few that are farther below are written out. Sign and mantissa stay as they are.

A *block* holds `BLOCK` numbers of a page in `BLOCK_BYTES`: four bits each (of number *i* the lower
half of byte *i*, of number *i + 1,024* its upper half), a byte each of sign and mantissa, the
largest exponent of every `GROUP`, and how many exponents are written out, followed by these with
their places. Four bits that are all set and no exponent written out mean the exponent 0: zeros need
no room. A block in which more than `SPILLED` exponents would have to be written out can't be
packed."""

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


def blocks_of(kv: Num[Tensor, "layers 2 pages kv_heads page_size head_dim"]) -> int:
    """How many blocks a page's keys of one layer are; 0 if they are not whole blocks, or not of
    bfloat16, and can't be packed."""
    numbers = kv[0, 0, 0].numel()
    whole = numbers % BLOCK == 0 and kv.dtype is torch.bfloat16
    return numbers // BLOCK if whole else 0


def pack_pages(
    kv: BFloat16[Tensor, "layers 2 pool_pages kv_heads page_size head_dim"],
    pages: Int[Tensor, " pages"],
    length: int,
    packed: UInt8[Tensor, "layers 2 blocks block_bytes"],
    spilled: Int[Tensor, " 1"],
    implementation: Implementation = "auto",
) -> None:
    """Write the ``length`` tokens of ``pages`` to ``packed``, the slots behind them as zeros.

    ``spilled`` becomes 1 if some block can't be packed, and is left alone otherwise; ``packed`` is
    worth nothing then."""
    if choose(implementation, kv) == "triton":
        from looseleaf.ops.packed_pages.kernel import pack_pages_triton

        pack_pages_triton(kv, pages, length, packed, spilled)
    else:
        pack_pages_reference(kv, pages, length, packed, spilled)


def unpack_pages(
    packed: UInt8[Tensor, "some 2 blocks block_bytes"],
    pages: Int[Tensor, " pages"] | range,
    first_layer: int,
    kv: BFloat16[Tensor, "layers 2 pool_pages kv_heads page_size head_dim"],
    implementation: Implementation = "auto",
) -> None:
    """Write what `pack_pages` wrote to ``pages`` of the layers from ``first_layer`` on, in place;
    nowhere if a page is negative. Pages of several documents may stand one behind the other."""
    if choose(implementation, kv) == "triton":
        from looseleaf.ops.packed_pages.kernel import unpack_pages_triton

        unpack_pages_triton(packed, pages, first_layer, kv)
    else:
        unpack_pages_reference(packed, torch.as_tensor(pages), first_layer, kv)
