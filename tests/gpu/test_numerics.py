"""The sweep of tests/ops/test_numerics.py in bf16 at real sizes, by the portable kernels and by the
tiles that planned lists are launched with; every row is held against its budget."""

from dataclasses import replace

import pytest
import torch

from looseleaf.ops.page_dtypes import FP8, to_pages
from looseleaf_lab.bench.numerics_table import HEADS, LARGE, ROWS, decoded, lists_of
from looseleaf_lab.testing.budget import assert_state_within_budget
from looseleaf_lab.testing.lists import work_list
from looseleaf_lab.testing.numerics import HEAD_DIMS, ragged_scene
from looseleaf_lab.testing.oracle import dense_attention, plain_attention

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_error_is_within_the_budget_of_the_data(heads: str, head_dim: int, rows: int) -> None:
    num_qo_heads, num_kv_heads = HEADS[heads]
    shape = replace(LARGE, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    scene = ragged_scene(rows, shape, rows)
    truth, plain = dense_attention(scene), plain_attention(scene)
    for work in lists_of(scene).values():
        assert_state_within_budget(decoded(scene, work), truth, plain, shape.dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", [1, 33, 256])
def test_pages_of_e4m3_are_read_as_what_they_hold(head_dim: int, rows: int) -> None:
    scene = ragged_scene(
        rows, replace(LARGE, head_dim=head_dim, num_qo_heads=32, num_kv_heads=8), rows
    )
    k_pages, v_pages = to_pages(scene.k_pages, FP8), to_pages(scene.v_pages, FP8)
    narrow = replace(scene, k_pages=k_pages, v_pages=v_pages)
    # exact: every number of e4m3 is one of bf16, which is what the queries have
    wide = replace(scene, k_pages=k_pages.bfloat16(), v_pages=v_pages.bfloat16())
    for work in (work_list(scene), work_list(scene, grouped=False)):
        actual, expected = decoded(narrow, work), decoded(wide, work)
        torch.testing.assert_close(actual.lse, expected.lse, rtol=1e-4, atol=1e-4)
        off = (actual.out.double() - expected.out.double()).norm() / expected.out.double().norm()
        assert off < 2 * torch.finfo(torch.bfloat16).eps
