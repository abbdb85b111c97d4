"""Laws of the fused store: rotated, rounded once, at its slot and nowhere else."""

import pytest
import torch
from torch import Tensor

from looseleaf.ops.store_kv import store_kv
from looseleaf_lab.testing.budget import assert_within_budget
from looseleaf_lab.testing.build import SceneBuilder
from looseleaf_lab.testing.scene import Shape, rotation_table, turned_at

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])
SLOTS = [5, 80, -1, 16, 17, 90, -7]
# the interpreter truncates to bf16 where a GPU rounds
PAGE_DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
FREQUENCIES = 0.9 ** torch.arange(20, dtype=torch.float64, device=DEVICE)


def stored(
    dtype: torch.dtype, page_dtype: torch.dtype, implementation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and pages after seven tokens of a strided projection went to six pages of 16."""
    fused = torch.randn(len(SLOTS), 12, 48, generator=torch.Generator().manual_seed(0))
    k, v = fused.to(DEVICE, dtype).split([6, 6], 1)
    # a page before and one after, where a wrong address would land
    pool = torch.full((8, 2, 6, 16, 48), torch.nan, dtype=page_dtype, device=DEVICE)
    k_pages, v_pages = pool[1:7, 0], pool[1:7, 1]
    positions = torch.arange(len(SLOTS), device=DEVICE, dtype=torch.int32) * 3
    slots = torch.tensor(SLOTS, device=DEVICE)
    table = rotation_table(FREQUENCIES, 20, False)
    store_kv(k, v, positions, slots, table, k_pages, v_pages, implementation)  # type: ignore[arg-type]
    return k, v, k_pages, v_pages


@BOTH
def test_keys_that_are_the_values_are_written_once(implementation: str) -> None:
    k, _, k_pages, _ = stored(torch.float32, torch.float32, implementation)
    pages = torch.full_like(k_pages, torch.nan)
    positions = torch.arange(len(SLOTS), device=DEVICE, dtype=torch.int32) * 3
    slots, table = torch.tensor(SLOTS, device=DEVICE), rotation_table(FREQUENCIES, 20, False)
    store_kv(k, k, positions, slots, table, pages, pages, implementation)  # type: ignore[arg-type]
    torch.testing.assert_close(pages, k_pages, equal_nan=True)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_dtype", PAGE_DTYPES)
def test_a_slot_holds_the_rotated_key_rounded_once(
    dtype: torch.dtype, page_dtype: torch.dtype, implementation: str
) -> None:
    k, v, k_pages, v_pages = stored(dtype, page_dtype, implementation)
    positions = torch.arange(len(SLOTS), device=DEVICE) * 3
    truth = turned_at(k.double(), positions, FREQUENCIES, False)
    plain = turned_at(k.float(), positions, FREQUENCIES, False).to(page_dtype)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            page, at = slot // 16, slot % 16
            assert_within_budget(k_pages[page, :, at], truth[token], plain[token], page_dtype)
            assert torch.equal(v_pages[page, :, at], v[token].to(page_dtype))


@BOTH
def test_nothing_else_is_written(implementation: str) -> None:
    _, _, k_pages, v_pages = stored(torch.float32, torch.float32, implementation)
    kept = torch.ones(6 * 16, dtype=torch.bool, device=DEVICE)
    kept[[slot for slot in SLOTS if slot >= 0]] = False
    around = k_pages._base
    assert around is not None
    assert (~around.isnan()).sum() == 2 * 5 * k_pages[0, :, 0].numel()
    for pages in (k_pages, v_pages):
        by_slot = pages.transpose(1, 2).flatten(0, 1)
        assert by_slot[kept].isnan().all()
        assert not by_slot[~kept].isnan().any()


@BOTH
def test_no_tokens_are_nothing_to_store(implementation: str) -> None:
    none = torch.zeros(0, 2, 32, device=DEVICE)
    nowhere = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    pages = torch.full((1, 2, 16, 32), torch.nan, device=DEVICE)
    table = rotation_table(FREQUENCIES[:16], 4, False)
    store_kv(none, none, nowhere, nowhere, table, pages, pages.clone(), implementation)  # type: ignore[arg-type]
    assert pages.isnan().all()


@BOTH
@pytest.mark.parametrize("interleaved", [False, True])
def test_stored_segments_are_the_pages_that_attention_expects(
    interleaved: bool, implementation: str
) -> None:
    """One frame rule on both sides: token j of a segment keeps angle j."""
    builder = SceneBuilder(3, Shape(interleaved=interleaved, device=DEVICE))
    scene = builder.decode()
    k_pages = torch.full_like(scene.k_pages, torch.nan)
    v_pages = k_pages.clone()
    for segment in builder.segments:
        at = torch.arange(segment.length, device=DEVICE)
        slots = torch.tensor(segment.pages, device=DEVICE)[at // 16] * 16 + at % 16
        store_kv(
            segment.k, segment.v, segment.positions, slots, scene.rotation, k_pages, v_pages,
            implementation,  # type: ignore[arg-type]
        )  # fmt: skip
    seen = ~scene.k_pages.isnan()
    torch.testing.assert_close(k_pages[seen], scene.k_pages[seen])
    assert torch.equal(v_pages[seen], scene.v_pages[seen])
