"""Bursts that benchmarks time on a CUDA device take as long as their work."""

import pytest
import torch

from looseleaf_lab.bench.replays import seconds_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)


@pytest.mark.parametrize("captured", [False, True])
def test_a_burst_on_a_gpu_takes_as_long_as_its_work(captured: bool) -> None:
    device = torch.device("cuda")
    few, many = (torch.zeros(n, device=device) for n in (1 << 20, 1 << 27))
    short = seconds_of(lambda: few.add_(1), device, captured=captured)
    long = seconds_of(lambda: many.add_(1), device, captured=captured)
    assert 0 < 4 * short() < long() < 1
    many.zero_()
    long()
    # half as many come before those that are counted
    assert float(many[0]) >= 2
