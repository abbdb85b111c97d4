"""Packed pages: every number comes back bit by bit, or the packing says that it can't."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.packed_pages import (
    BLOCK,
    BLOCK_BYTES,
    GROUP,
    SPILLED,
    blocks_of,
    pack_pages,
    unpack_pages,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POOL = 9


def drawn(seed: int, layers: int, heads: int, page_size: int, head_dim: int) -> Tensor:
    """Pages of numbers whose groups differ in size by far, with some zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    shape = layers, 2, POOL, heads, page_size, head_dim
    numbers = torch.randn(shape, generator=generator).view(-1, GROUP)
    kv = (numbers * torch.randn(len(numbers), 1, generator=generator).mul(20).exp2()).view(shape)
    kv[torch.rand(shape, generator=generator) < 0.01] = 0
    kv[torch.rand(shape, generator=generator) < 0.01] *= -0.0
    return kv.bfloat16().to(DEVICE)


def packed_of(
    kv: Tensor, pages: list[int], length: int, implementation: Implementation
) -> tuple[Tensor, bool]:
    room = len(kv), 2, len(pages) * blocks_of(kv), BLOCK_BYTES
    packed = torch.full(room, 77, dtype=torch.uint8, device=DEVICE)
    spilled = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    numbers = torch.tensor(pages, dtype=torch.int64, device=DEVICE)
    pack_pages(kv, numbers, length, packed, spilled, implementation)
    return packed, bool(spilled)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


SHAPES = [(2, 1, 16, 128), (2, 2, 16, 64), (1, 4, 32, 32), (1, 3, 16, 128)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_pages_come_back_bit_by_bit_to_any_pages_and_no_other(
    shape: tuple[int, int, int, int], implementation: Implementation
) -> None:
    kv, target = drawn(1, *shape), drawn(2, *shape)
    before, page_size = target.clone(), shape[2]
    documents = [([3, 1], page_size + 5), ([6, 7, 2], 3 * page_size)]
    packed = []
    for pages, length in documents:
        content, spilled = packed_of(kv, pages, length, implementation)
        assert not spilled
        packed.append(content)
    # both together, the first layer alone, then the others; one page goes nowhere
    together = torch.cat(packed, 2)
    pages = torch.tensor([8, 0, -1, 4, 5], dtype=torch.int32, device=DEVICE)
    for layers in (slice(0, 1), slice(1, None)):
        unpack_pages(together[layers], pages, layers.start, target, implementation)
    assert same_bits(target[:, :, [8, 4, 5]], kv[:, :, [3, 7, 2]])
    assert same_bits(target[:, :, 0, :, :5], kv[:, :, 1, :, :5])
    assert (target[:, :, 0, :, 5:].view(torch.int16) == 0).all()
    others = [1, 2, 3, 6, 7]
    assert same_bits(target[:, :, others], before[:, :, others])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_run_of_pages_needs_no_list(implementation: Implementation) -> None:
    kv, target = drawn(3, 2, 1, 16, 128), drawn(4, 2, 1, 16, 128)
    content, _ = packed_of(kv, [5, 0], 32, implementation)
    unpack_pages(content, range(6, 8), 0, target, implementation)
    assert same_bits(target[:, :, [6, 7]], kv[:, :, [5, 0]])
    others = [0, 1, 2, 3, 4, 5, 8]
    assert same_bits(target[:, :, others], drawn(4, 2, 1, 16, 128)[:, :, others])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("far", [0, 1, SPILLED, SPILLED + 1, BLOCK // 2])
def test_a_block_holds_so_many_far_exponents_and_says_if_there_are_more(
    implementation: Implementation, far: int
) -> None:
    kv = torch.ones(1, 2, POOL, 1, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    places = torch.randperm(BLOCK - 16, generator=torch.Generator().manual_seed(far))[:far]
    # the largest of each group stays, or what is far would be near
    places = places // 127 * 128 + 1 + places % 127
    kv[0, 1, 4].view(-1)[places.to(DEVICE)] = -(2.0**-15)
    content, spilled = packed_of(kv, [2, 4], 32, implementation)
    assert spilled == (far > SPILLED)
    if not spilled:
        target = torch.zeros_like(kv)
        unpack_pages(content, range(7, 9), 0, target, implementation)
        assert same_bits(target[:, :, [7, 8]], kv[:, :, [2, 4]])


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=64), st.integers(0, 14))
def test_whatever_is_near_enough_comes_back(bits: list[int], below: int) -> None:
    """Any sign and mantissa, infinities and numbers that are none among them."""
    words = torch.tensor(bits).repeat(BLOCK // len(bits) + 1)[:BLOCK]
    top = int((words >> 7 & 0xFF).max())
    exponent = (words >> 7 & 0xFF).clamp(min=max(0, top - below))
    words = words & 0x807F | exponent << 7
    kv = words.to(torch.int16).view(torch.bfloat16).view(1, 1, 1, 1, 16, 128)
    kv = kv.expand(1, 2, POOL, 1, 16, 128).contiguous().to(DEVICE)
    content, spilled = packed_of(kv, [1], 16, "reference")
    assert not spilled
    target = torch.zeros_like(kv)
    unpack_pages(content, range(3, 4), 0, target, "reference")
    assert same_bits(target[:, :, 3], kv[:, :, 1])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_packs_and_unpacks_what_the_reference_does(
    shape: tuple[int, int, int, int],
) -> None:
    kv, page_size = drawn(5, *shape), shape[2]
    one, _ = packed_of(kv, [4, 0, 7], 2 * page_size + 1, "reference")
    other, _ = packed_of(kv, [4, 0, 7], 2 * page_size + 1, "triton")
    assert torch.equal(one, other)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_bytes_that_nobody_packed_reach_their_pages_and_no_other(
    implementation: Implementation,
) -> None:
    shape = 2, 1, 16, 128
    target, before = drawn(6, *shape), drawn(6, *shape)
    noise = torch.randint(0, 256, (2, 2, 3, BLOCK_BYTES), dtype=torch.uint8).to(DEVICE)
    pages = torch.tensor([2, 8, 1], dtype=torch.int32, device=DEVICE)
    unpack_pages(noise, pages, 0, target, implementation)
    others = [0, 3, 4, 5, 6, 7]
    assert same_bits(target[:, :, others], before[:, :, others])
    assert not same_bits(target[:, :, [1, 2, 8]], before[:, :, [1, 2, 8]])


def test_what_can_not_be_packed_is_known_before() -> None:
    kv = torch.zeros(1, 2, POOL, 1, 16, 128, dtype=torch.bfloat16)
    assert blocks_of(kv) == 1 and blocks_of(kv.expand(1, 2, POOL, 3, 16, 128)) == 3
    assert blocks_of(kv.half()) == blocks_of(kv.float()) == 0
    assert blocks_of(kv[..., :64]) == 0


@pytest.mark.parametrize("length", [0, 16, 20, 32, 47])
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_whole_pages_behind_the_length_are_zeros_too(
    length: int, implementation: Implementation
) -> None:
    kv, target = drawn(1, 1, 1, 16, 128), drawn(2, 1, 1, 16, 128)
    pages = [3, 1, 5]
    packed, spilled = packed_of(kv, pages, length, implementation)
    assert not spilled
    unpack_pages(packed, torch.tensor(pages, device=DEVICE), 0, target, implementation)
    found = target[0, :, pages].transpose(1, 2).flatten(2, 3)
    there = kv[0, :, pages].transpose(1, 2).flatten(2, 3)
    assert same_bits(found[:, :, :length], there[:, :, :length])
    assert not found[:, :, length:].any()
