"""Laws of the likeliest token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.ops.dense.likeliest import likeliest
from looseleaf.ops.dispatch import Implementation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (3, 4096), (5, 9001)])
def test_it_is_the_first_of_the_largest(
    implementation: Implementation, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    # few values, so that the largest stands in several places, in several stretches
    logits = torch.randint(-3, 3, shape).to(dtype).to(DEVICE)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert likeliest(logits, implementation).tolist() == expected


@given(vocab=st.integers(1, 9000), rows=st.integers(1, 3), seed=st.integers(0, 1000))
def test_rows_may_lie_apart(vocab: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, vocab + 5, generator=generator)
    wide[:, vocab:] = 100.0
    found = likeliest(wide.to(DEVICE)[:, :vocab], "triton")
    assert found.tolist() == wide[:, :vocab].argmax(-1).tolist()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_row_without_numbers_gives_some_token(implementation: Implementation) -> None:
    logits = torch.full((3, 5000), float("nan"), device=DEVICE)
    logits[1] = float("-inf")
    logits[2, 4800] = 1.0
    found = likeliest(logits, implementation).tolist()
    assert all(0 <= token < 5000 for token in found)
    assert found[1] == 0
