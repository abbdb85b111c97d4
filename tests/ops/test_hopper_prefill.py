"""Queries that are turned ahead are those that each span would have turned, and it is said where
they can't be."""

import pytest
import torch

from looseleaf.errors import InvalidOption
from looseleaf.ops.hopper_prefill.kernel import turn_queries
from looseleaf.ops.prefill_attention import prefill_attention_ahead, serves_ahead
from looseleaf.testing.budget import assert_within_budget
from looseleaf.testing.build import SceneBuilder
from looseleaf.testing.lists import span_list
from looseleaf.testing.scene import Shape, turned_at
from looseleaf.types import ScoreRule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "shape",
    [
        Shape(head_dim=64, num_requests=1),
        Shape(head_dim=128, num_qo_heads=8, num_requests=1, rotary_dim=48, interleaved=True),
    ],
)
def test_a_row_is_turned_to_where_it_stands_in_each_span(shape: Shape) -> None:
    scene, rows_of, spans_of = SceneBuilder(1, shape).prefill()
    placements = spans_of[0]
    offsets = torch.tensor([placement.offset for placement in placements], dtype=torch.int32)
    positions = torch.tensor(scene.row_positions, dtype=torch.int32)
    lists = offsets.to(DEVICE), positions.to(DEVICE)
    q, rule = scene.q.to(DEVICE), ScoreRule(0.25)
    turned = turn_queries(q, shape.num_kv_heads, lists, scene.rotation, rule)
    group = shape.num_qo_heads // shape.num_kv_heads
    assert turned.shape == (len(placements), shape.num_kv_heads, len(q), group, shape.head_dim)
    for n, placement in enumerate(placements):
        at = (positions - placement.offset).clamp_min(0)
        scale = rule.softmax_scale / torch.log(torch.tensor(2.0, dtype=torch.float64))
        where = scene.frequencies, shape.interleaved
        truth = turned_at(scene.q.double(), at, *where) * scale
        plain = turned_at(scene.q, at, *where) * float(scale)
        # heads of a group stand side by side
        mine = turned[n].transpose(0, 1).flatten(1, 2).cpu()
        assert_within_budget(mine, truth, plain, torch.float32)
    assert rows_of


def test_where_queries_can_not_be_turned_ahead_it_is_said() -> None:
    scene, rows_of, spans_of = SceneBuilder(2, Shape(num_requests=2)).prefill()
    spans = span_list(scene, rows_of, spans_of, tile_rows=16)
    assert not serves_ahead(scene.k_pages, scene.rule, spans)
    with pytest.raises(InvalidOption, match="use prefill_attention"):
        prefill_attention_ahead(
            scene.q, scene.k_pages, scene.v_pages, spans, scene.rotation, scene.rule
        )
