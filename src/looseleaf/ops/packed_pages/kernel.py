"""Packing and unpacking on the device: one program per block, whose two halves are processed
together."""

import torch
import triton
import triton.language as tl
from jaxtyping import Int, UInt8
from torch import Tensor

from looseleaf.ops.packed_pages.layout import (
    BLOCK,
    BLOCK_BYTES,
    COUNT_AT,
    GROUP,
    LOW_AT,
    SPILLED,
    TOPS_AT,
)

_HALF_GROUPS = BLOCK // GROUP // 2


@triton.jit
def _half(kv, offset, last, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    # (exponent, sign and mantissa); slots from ``last`` on read as zeros
    in_document = offset // HEAD_DIM % PAGE_SIZE < last
    bits = tl.load(kv + offset, mask=in_document, other=0).to(tl.int32)
    return bits >> 7 & 0xFF, bits >> 8 & 0x80 | bits & 0x7F


@triton.jit
def _ranks(is_spilled):
    # (rank of each spill in the block, number of spills)
    row = tl.sum(is_spilled, axis=1)
    before = tl.cumsum(row, axis=0) - row
    return tl.cumsum(is_spilled, axis=1) - 1 + before[:, None], tl.sum(row, axis=0)


# compiled once for all lengths of documents
@triton.jit(do_not_specialize=["pool_pages", "length"])
def _pack_pages_kernel(
    kv, pages, packed, words, spilled, pool_pages, length,
    PAGE_NUMBERS: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, SPILLED: tl.constexpr,
    LOW_AT: tl.constexpr, TOPS_AT: tl.constexpr, COUNT_AT: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = PAGE_NUMBERS // BLOCK
    number, plane = tl.program_id(0) // BLOCKS, tl.program_id(1).to(tl.int64)
    page = tl.load(pages + number).to(tl.int64)
    last = length - number * PAGE_SIZE
    row, column = tl.arange(0, HALF), tl.arange(0, GROUP)
    offset = row[:, None] * GROUP + column[None, :]
    source = kv + (plane * pool_pages + page) * PAGE_NUMBERS
    begin = tl.program_id(0) % BLOCKS * BLOCK
    exponent, low = _half(source, begin + offset, last, PAGE_SIZE, HEAD_DIM)
    upper, upper_low = _half(source, begin + BLOCK // 2 + offset, last, PAGE_SIZE, HEAD_DIM)
    top, upper_top = tl.max(exponent, axis=1), tl.max(upper, axis=1)
    code = tl.minimum(top[:, None] - exponent, 15)
    upper_code = tl.minimum(upper_top[:, None] - upper, 15)
    block = plane * tl.num_programs(0) + tl.program_id(0)
    target = packed + block * BYTES
    tl.store(target + offset, (code | upper_code << 4).to(tl.uint8))
    tl.store(target + LOW_AT + offset, low.to(tl.uint8))
    tl.store(target + LOW_AT + BLOCK // 2 + offset, upper_low.to(tl.uint8))
    tl.store(target + TOPS_AT + row, top.to(tl.uint8))
    tl.store(target + TOPS_AT + HALF + row, upper_top.to(tl.uint8))
    is_spilled = ((code == 15) & (exponent > 0)).to(tl.int32)
    upper_is_spilled = ((upper_code == 15) & (upper > 0)).to(tl.int32)
    rank, count = _ranks(is_spilled)
    upper_rank, upper_count = _ranks(upper_is_spilled)
    upper_rank += count
    total = count + upper_count
    word = words + block * (BYTES // 4) + COUNT_AT // 4
    tl.store(word, tl.minimum(total, SPILLED))
    tl.store(word + 1 + rank, exponent << 11 | offset, mask=(is_spilled != 0) & (rank < SPILLED))
    tl.store(
        word + 1 + upper_rank, upper << 11 | offset + BLOCK // 2,
        mask=(upper_is_spilled != 0) & (upper_rank < SPILLED),
    )  # fmt: skip
    slot = tl.arange(0, 16)
    tl.store(word + 1 + slot, 0, mask=(slot >= total) & (slot < SPILLED))
    if total > SPILLED:
        tl.store(spilled, 1)


def pack_pages_triton(
    kv: Tensor,
    pages: Int[Tensor, " pages"],
    length: int,
    packed: UInt8[Tensor, "layers planes blocks block_bytes"],
    spilled: Int[Tensor, " 1"],
) -> None:
    """See `looseleaf.ops.packed_pages`."""
    assert kv.is_contiguous() and packed.is_contiguous(), "both must be contiguous"
    layers, planes, pool_pages, heads, page_size, head_dim = kv.shape
    blocks = packed.shape[2]
    if not blocks:
        return
    _pack_pages_kernel[(blocks, planes * layers)](
        kv.view(torch.int16), pages, packed, packed.view(torch.int32), spilled, pool_pages, length,
        PAGE_NUMBERS=heads * page_size * head_dim, PAGE_SIZE=page_size, HEAD_DIM=head_dim,
        BLOCK=BLOCK, GROUP=GROUP, HALF=_HALF_GROUPS, SPILLED=SPILLED, LOW_AT=LOW_AT,
        TOPS_AT=TOPS_AT, COUNT_AT=COUNT_AT, BYTES=BLOCK_BYTES, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


# few variants: a compilation would delay a load
@triton.jit(do_not_specialize=["first_page", "first_plane", "pool_pages"])
def _unpack_pages_kernel(
    packed, words, pages, kv, first_page, first_plane, pool_pages,
    RUN: tl.constexpr, PAGE_NUMBERS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    HALF: tl.constexpr, SPILLED: tl.constexpr, LOW_AT: tl.constexpr, TOPS_AT: tl.constexpr,
    COUNT_AT: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = PAGE_NUMBERS // BLOCK
    number = tl.program_id(0) // BLOCKS
    page = first_page + number.to(tl.int64) if RUN else tl.load(pages + number).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    block = plane * tl.num_programs(0) + tl.program_id(0)
    source, word = packed + block * BYTES, words + block * (BYTES // 4) + COUNT_AT // 4
    group, column = tl.arange(0, HALF), tl.arange(0, GROUP)
    offset = group[:, None] * GROUP + column[None, :]
    code = tl.load(source + offset).to(tl.int32)
    low = tl.load(source + LOW_AT + offset).to(tl.int32)
    upper_low = tl.load(source + LOW_AT + BLOCK // 2 + offset).to(tl.int32)
    top = tl.load(source + TOPS_AT + group).to(tl.int32)[:, None]
    upper_top = tl.load(source + TOPS_AT + HALF + group).to(tl.int32)[:, None]
    upper_code = code >> 4
    code = code & 15
    exponent = tl.where(code == 15, 0, top - code)
    upper = tl.where(upper_code == 15, 0, upper_top - upper_code)
    for spill in range(tl.minimum(tl.load(word), SPILLED)):
        word_value = tl.load(word + 1 + spill)
        index = word_value & (BLOCK - 1)
        exponent = tl.where(offset == index, word_value // BLOCK, exponent)
        upper = tl.where(offset + BLOCK // 2 == index, word_value // BLOCK, upper)
    bits = (low & 0x80) << 8 | (exponent & 0xFF) << 7 | low & 0x7F
    upper_bits = (upper_low & 0x80) << 8 | (upper & 0xFF) << 7 | upper_low & 0x7F
    target = kv + ((first_plane + plane) * pool_pages + page) * PAGE_NUMBERS
    target += tl.program_id(0) % BLOCKS * BLOCK
    if page >= 0:
        tl.store(target + offset, bits.to(tl.int16))
        tl.store(target + BLOCK // 2 + offset, upper_bits.to(tl.int16))


class Unpacker:
    """The unpack kernel, compiled for the pages of one pool.

    Its launch skips Triton's inspection of arguments and takes a fifth of the time. ``page_bytes``
    is the packed size of a page's K in one layer, ``pool_bytes`` that of the whole pool."""

    def __init__(self, kv: Tensor) -> None:
        assert kv.is_contiguous(), "pages must be contiguous"
        self._pages, self._planes, self._pool_pages = kv.data_ptr(), kv.shape[1], kv.shape[2]
        heads, page_size, head_dim = kv.shape[3:]
        numbers = heads * page_size * head_dim
        self.device, self._blocks = kv.device, numbers // BLOCK
        self.page_bytes = self._blocks * BLOCK_BYTES
        self.pool_bytes = self._planes * len(kv) * self._pool_pages * self.page_bytes
        block = BLOCK, GROUP, _HALF_GROUPS, SPILLED, LOW_AT, TOPS_AT, COUNT_AT, BLOCK_BYTES
        self._sizes = numbers, *block
        # page -1: the compilation run writes nothing
        no_page = torch.full((1,), -1, dtype=torch.int32, device=kv.device)
        packed = torch.zeros(2 * self._blocks * BLOCK_BYTES, dtype=torch.uint8, device=kv.device)
        self._listed, self._run = (
            _unpack_pages_kernel[(self._blocks, 2)](
                packed, packed.view(torch.int32), no_page, kv.view(torch.int16), -1, 0,
                self._pool_pages, run, *self._sizes, num_warps=4, enable_fp_fusion=True,
            )
            for run in (False, True)
        )  # fmt: skip

    @property
    def handle(self) -> tuple[int, int, int]:
        """Driver handle, threads and bytes of shared memory of the kernel that unpacks a run of
        pages.

        For launches outside of Triton. The arguments are the address of the packed bytes three
        times, the address of the pool, and as int32 the first page, the first plane and the pages
        of the pool. The grid is (programs of the K of all pages, planes of the layers)."""
        kernel = self._run
        metadata = kernel.metadata
        return int(kernel.function), 32 * metadata.num_warps, metadata.shared

    def launch(
        self,
        packed: int,
        pages: int,
        num_pages: int,
        first_layer: int,
        num_layers: int,
        stream: int,
    ) -> None:
        """`unpack_pages` on the CUDA stream ``stream``, given by its handle.

        ``packed`` is the address of the packed bytes, ``pages`` that of the int32 page numbers.
        Addresses are multiples of 16."""
        planes = self._planes
        self._listed[num_pages * self._blocks, planes * num_layers, 1](
            packed, packed, pages, self._pages, 0, planes * first_layer, self._pool_pages,
            False, *self._sizes, stream=stream,
        )  # fmt: skip


def unpack_pages_triton(
    packed: UInt8[Tensor, "some planes blocks block_bytes"],
    pages: Int[Tensor, " pages"] | range,
    first_layer: int,
    kv: Tensor,
) -> None:
    """See `looseleaf.ops.packed_pages`."""
    assert kv.is_contiguous() and packed.is_contiguous(), "both must be contiguous"
    heads, page_size, head_dim = kv.shape[3:]
    run, blocks = isinstance(pages, range), packed.shape[2]
    if not blocks:
        return
    page_list, first = (packed, pages.start) if isinstance(pages, range) else (pages, 0)
    planes = kv.shape[1]
    _unpack_pages_kernel[(blocks, planes * len(packed))](
        packed, packed.view(torch.int32), page_list, kv.view(torch.int16), first,
        planes * first_layer, kv.shape[2],
        RUN=run, PAGE_NUMBERS=heads * page_size * head_dim, BLOCK=BLOCK, GROUP=GROUP,
        HALF=_HALF_GROUPS, SPILLED=SPILLED, LOW_AT=LOW_AT, TOPS_AT=TOPS_AT, COUNT_AT=COUNT_AT,
        BYTES=BLOCK_BYTES, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
