"""What a layer adds to the stream on a GPU where it is normed or multiplied before: summed up from
its parts first, and then what it is by definition."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.models.layers import Norm, Stream, add_branch, apply_norm
from looseleaf.models.linear import Projection
from looseleaf.ops.dense.split_linear import num_parts
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.testing.budget import assert_within_budget

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)
DEVICE = "cuda"
FEATURES, INNER = 1024, 2048
CONFIGS = {
    "normed": replace(model_shape("tiny"), post_norms=True, norm_offset=1.0),
    "multiplied": replace(model_shape("tiny"), residual_multiplier=0.22),
    "both": replace(model_shape("tiny"), post_norms=True, residual_multiplier=0.22),
}


def added(drawn: list[Tensor], config: ModelConfig, place: torch.dtype | str) -> list[Tensor]:
    """The stream with a branch, and its next norm, in a dtype or on a device."""
    stream, hidden, weight, *norms = (x.to(place).clone() for x in drawn)
    own = Norm(norms[0]) if config.post_norms else None
    branch = add_branch(Stream(stream), hidden, Projection(weight), own, config)
    normed, settled = apply_norm(branch, Norm(norms[1]), config)
    return [settled.settled(), normed]


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 200, 600])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_branch_is_normed_and_multiplied_as_a_whole(kind: str, rows: int) -> None:
    drawn = [torch.randn(rows, FEATURES), torch.randn(rows, INNER)]
    drawn += [torch.randn(FEATURES, INNER) * INNER**-0.5, *(1 + torch.randn(2, FEATURES) / 4)]
    drawn = [x.to(torch.bfloat16) for x in drawn]
    on_device = [x.to(DEVICE) for x in drawn]
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    assert (num_parts(*on_device[1:3], processors) > 1) == (rows <= 64)
    mine = added(on_device, CONFIGS[kind], DEVICE)
    truth = added(drawn, CONFIGS[kind], torch.float64)
    plain = added(drawn, CONFIGS[kind], "cpu")
    for got, exact, other in zip(mine, truth, plain, strict=True):
        assert got.dtype == torch.bfloat16
        assert_within_budget(got.cpu(), exact, other, torch.bfloat16)
