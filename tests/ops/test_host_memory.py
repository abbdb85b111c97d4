"""Memory of the host is zeros of the shape, small or in huge pages, and lives as long as a view."""

import mmap

import pytest
import torch

from looseleaf.ops.native.host_memory import host_zeros


@pytest.mark.parametrize("shape", [(3, 5), (2, 3 << 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_zeros_that_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = host_zeros(shape, dtype)
    assert memory.shape == shape and memory.dtype == dtype and not memory.any()
    last = memory[-1]
    memory[-1] = 2
    del memory
    assert bool((last == 2).all())


def test_a_system_without_huge_pages_has_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not host_zeros((2, 3 << 20), torch.float32).any()
