"""Laws of the rotation: it is a turn in the plane, and a score knows distances only."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.errors import InvalidOption
from looseleaf.ops.page_dtypes import FP8, to_pages
from looseleaf.ops.rotate import rotate
from looseleaf_lab.testing.budget import assert_within_budget
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.scene import rotation_table, turned_at

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = [
    pytest.param(64, 64, False, id="halves"),
    pytest.param(64, 64, True, id="interleaved"),
    pytest.param(80, 32, False, id="partial-halves"),
    pytest.param(96, 24, True, id="partial-interleaved"),
    pytest.param(32, 0, False, id="no-rotation"),
]


def frequencies(rotary_dim: int, device: str = "cpu") -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device)
    return 1.0 / 10000 ** (exponents / max(rotary_dim, 1))


@pytest.mark.parametrize(("head_dim", "rotary_dim", "interleaved"), LAYOUTS)
def test_rotation_is_a_complex_product(head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    x = torch.randn(7, 3, head_dim, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 17, 99, 98, 50])
    table = rotation_table(frequencies(rotary_dim), 100, interleaved, torch.float64)
    expected = turned_at(x, positions, frequencies(rotary_dim), interleaved)
    torch.testing.assert_close(rotate(x, positions, table, "reference"), expected)


@given(
    st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000), st.booleans(), st.integers()
)
def test_a_score_depends_on_the_distance_only(
    row: int, offset: int, key: int, interleaved: bool, seed: int
) -> None:
    """⟨R(p)q, R(Δ+j)k⟩ = ⟨R(p−Δ)q, R(j)k⟩: a key may stay in its frame if the query comes to it."""
    row += offset
    generator = torch.Generator().manual_seed(seed % 2**32)
    q, k = torch.randn(2, 1, 4, 80, dtype=torch.float64, generator=generator)
    table = rotation_table(frequencies(64), 4001, interleaved, torch.float64)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, torch.tensor([position]), table, "reference")

    there = (turned(q, row) * turned(k, offset + key)).sum(-1)
    here = (turned(q, row - offset) * turned(k, key)).sum(-1)
    torch.testing.assert_close(here, there)


def test_dims_past_the_rotary_dim_are_copied() -> None:
    x = torch.randn(5, 2, 64)
    table = rotation_table(frequencies(16), 50, False)
    turned = rotate(x, torch.arange(5) * 9, table, "reference")
    assert torch.equal(turned[..., 16:], x[..., 16:])
    assert not torch.equal(turned[1:, :, :16], x[1:, :, :16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "interleaved"), LAYOUTS)
@pytest.mark.parametrize("strided", [False, True])
def test_kernel_rotates_within_the_budget(
    head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype, strided: bool
) -> None:
    fused = torch.randn(9, 5, 2 * head_dim if strided else head_dim).to(DEVICE, dtype)
    x = fused[:, 1:, ::2] if strided else fused
    positions = torch.tensor([0, 1, 2, 3, 500, 499, 7, 7, 31], dtype=torch.int32, device=DEVICE)
    angles = frequencies(rotary_dim, DEVICE)
    with poisoned():
        turned = rotate(x, positions, rotation_table(angles, 501, interleaved), "triton")
    truth = turned_at(x.double(), positions, angles, interleaved)
    plain = turned_at(x.float(), positions, angles, interleaved).to(dtype)
    assert turned.dtype == dtype
    assert_within_budget(turned, truth, plain, dtype)


@pytest.mark.parametrize("positions", [[0, -1, 2], [3, 50, 1]])
def test_a_position_that_the_table_does_not_have_is_refused(positions: list[int]) -> None:
    table = rotation_table(frequencies(64), 50, False)
    with pytest.raises(InvalidOption, match="not all in a table of 50"):
        rotate(torch.randn(3, 2, 64), torch.tensor(positions), table, "reference")
    none = torch.zeros(0, dtype=torch.int64)
    assert rotate(torch.randn(0, 2, 64), none, table, "reference").shape == (0, 2, 64)


def test_what_pages_hold_is_not_turned() -> None:
    narrow = to_pages(torch.randn(3, 2, 64), FP8)
    with pytest.raises(InvalidOption, match="rotate a vector before it is stored"):
        rotate(narrow, torch.arange(3), rotation_table(frequencies(64), 50, False))
