"""Queries times a factor by their own position, while the keys that they read have moved."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from looseleaf import Fuse
from looseleaf.config import QueryScaling
from looseleaf.rope import position_scales
from tests.checkpoints import ORIGINAL_POSITIONS
from tests.engine.fused import SEVERAL, blend
from tests.engine.harness import TOLERANCE, Folder, make_llm, worst
from tests.engine.oracle import blended_logits, dense_logits

OPTIONS: list[dict[str, Any]] = [
    {},
    {"cpu_kernels": "torch", "max_num_batched_tokens": 9, "max_num_seqs": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "fuse", [None, Fuse("random", ratio=0.3), Fuse("links", ratio=0.3)], ids=str
)
def test_a_factor_is_that_of_the_position_at_which_a_row_is_computed(
    checkpoint: Folder, options: dict[str, Any], fuse: Fuse | None
) -> None:
    """A document's rows at their place behind the lead, rows computed again at their true one."""
    llm = make_llm(checkpoint("ministral3"), max_model_len=220, **options)
    answer = blend(llm, SEVERAL, fuse)
    model, output = llm.engine.runner.model, list(answer.output.token_ids)
    # the documents stand beyond the first period, where they were not encoded
    assert answer.output.reuse.documents[-1].offset > ORIGINAL_POSITIONS
    last = slice(-len(output) - 1, -1)
    expected = blended_logits(model, answer.parts, output, answer.chosen)[last]
    assert worst(answer.logits, expected) <= TOLERANCE
    config = model.config
    try:
        model.config = replace(config, query_scaling=None)
        plain = dense_logits(model, answer.parts, output)[last]
    finally:
        model.config = config
    assert worst(answer.logits, plain) > 10 * TOLERANCE


def test_factors_rise_with_the_log_of_whole_periods() -> None:
    positions = torch.tensor([0, 15, 16, 47, 48, 1600])
    scales = position_scales(QueryScaling(0.5, 16), positions)
    periods = torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0, 100.0])
    torch.testing.assert_close(scales, 1 + 0.5 * (1 + periods).log())
    assert scales[:2].tolist() == [1.0, 1.0]
