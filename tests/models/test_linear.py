"""A packed matrix multiplies as the plain one does, whatever the number of rows."""

import pytest
import torch

from looseleaf.models.linear import Projection, add_project, can_pack, pack, padded_rows, project

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32, torch.device("cpu")), reason="this machine packs no matrices"
)


@pytest.mark.parametrize("rows", [1, 7, 9, 63, 64, 65, 100, 257])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_product_is_the_plain_one(rows: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 32, generator=generator)
    plain = Projection(weight, torch.randn(48, generator=generator) if with_bias else None)
    packed = pack(plain)
    assert packed.weight.is_mkldnn
    hidden, residual = torch.randn(rows, 32), torch.randn(rows, 48)
    before = residual.clone()
    torch.testing.assert_close(project(hidden, packed), project(hidden, plain))
    summed = add_project(residual, hidden, packed)
    torch.testing.assert_close(summed, add_project(residual, hidden, plain))
    assert torch.equal(residual, before)
    assert project(hidden, packed).is_contiguous() and summed.is_contiguous()


def test_products_come_in_few_sizes() -> None:
    """A program is compiled for each: their number must not grow with what users send."""
    sizes = {padded_rows(rows) for rows in range(1, 2049)}
    assert len(sizes) < 80
    assert all(rows <= padded_rows(rows) < rows + 32 for rows in range(1, 2049))
    assert all(padded_rows(rows) == rows for rows in (*range(1, 9), 16, 64, 2048))
