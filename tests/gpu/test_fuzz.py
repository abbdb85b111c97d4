"""Requests drawn at random are answered by a GPU as each alone is in fp32 on a CPU: a short form of
`tools.fuzz`."""

import pytest
import torch

from tools.fuzz import Fuzz, parsed

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)


# heads of 128 in groups of three, one KV head, and heads that only Triton's kernels serve
@pytest.mark.parametrize("seed", [1, 7, 2])
def test_mixes_are_answered_as_in_fp32_on_a_cpu(seed: int) -> None:
    run = Fuzz(parsed(["--device=cuda", f"--seed={seed}", "--rounds=10"]))
    assert run() == 0, run.failures
    assert run.asked > 20
