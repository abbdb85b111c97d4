"""Bounds of a page are the largest and the least of its keys, in whatever dtype pages are."""

import pytest
import torch

from looseleaf.ops.page_bounds import page_bounds
from looseleaf.ops.page_dtypes import FP8, to_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8])
def test_bounds_are_keys_of_the_page(dtype: torch.dtype) -> None:
    pages = to_pages(torch.randn(2, 3, 2, 16, 32), dtype)
    num_keys = torch.tensor([16, 5, 1], dtype=torch.int32)
    bounds = page_bounds(pages, num_keys)
    assert bounds.dtype is dtype
    for page, count in enumerate(num_keys.tolist()):
        keys = pages[:, page, :, :count].float()
        assert torch.equal(bounds[:, page, :, :32].float(), keys.amax(2))
        assert torch.equal(bounds[:, page, :, 32:].float(), keys.amin(2))
