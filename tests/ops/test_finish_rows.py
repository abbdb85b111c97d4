"""What a row reads when it is merged is what a launch of its own would have read."""

from dataclasses import replace

import pytest
import torch

from looseleaf.attention.plan.cost_model import CostModel, default_cost_model
from looseleaf.attention.plan.planner import Planner
from looseleaf.config import RopeConfig
from looseleaf.errors import InvalidOption
from looseleaf.ops.finish_rows import finish_rows
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import Tile, WorkList, partial_attention
from looseleaf.rope import build_rotation
from looseleaf.types import AttnState, Rotation, ScoreRule
from looseleaf_lab.bench.attention_cases import AttentionShape, Case, shared
from looseleaf_lab.testing.budget import assert_state_within_budget
from looseleaf_lab.testing.poison import poisoned
from tests.ops.small_lists import angles, int32, one_item

DEVICE = torch.device("cpu")
RULE = ScoreRule(0.2)


def costs_that_widen(head_dim: int) -> CostModel:
    """Wide tiles for nothing, so that a few rows are read by them."""
    costs = default_cost_model(head_dim, 2, 132, hopper=True)
    wide = replace(costs.wide, start=0.0, per_key=1e-4, per_key_alone=1e-4)
    return replace(costs, wide=wide, launch=0.0)


def planned(case: Case, shape: AttentionShape, *, finishing: bool) -> WorkList:
    costs = costs_that_widen(shape.head_dim)
    heads = shape.num_qo_heads, shape.num_kv_heads
    planner = Planner(shape.page_size, *heads, DEVICE, costs, finishing=finishing)
    work = planner.plan(case.rows, planner.group(case.rows, grouping=True), (), finish=True).work
    assert work is not None
    assert work.finishing is finishing
    return work


def merged(
    q: torch.Tensor, pages: torch.Tensor, work: WorkList, rotation: Rotation, how: str
) -> AttnState:
    """The rows of ``work``, by both operators where it is finishing."""
    out = torch.empty_like(q)
    with poisoned():
        states = partial_attention(q, *pages, work, rotation, RULE, implementation=how)
        if work.finishing:
            return finish_rows(states, q, (pages[0], pages[1]), work, rotation, RULE, out, how)
        return merge_states(states, work.row_state_indptr, out=out, implementation=how)


@pytest.mark.parametrize("how", ["reference", "triton"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "rotary_dim"),
    [((8, 2), 64, 16, 64), ((10, 2), 80, 8, 32), ((16, 1), 32, 32, 32), ((6, 2), 64, 64, 64)],
)
def test_rows_that_are_finished_are_those_of_a_list_that_reads_everything(
    heads: tuple[int, int], head_dim: int, page_size: int, rotary_dim: int, how: str
) -> None:
    shape = AttentionShape(*heads, head_dim, page_size, 1, torch.float32)
    case = shared(shape, 24, 256, tail=page_size + 5, spread=3)
    torch.manual_seed(page_size)
    size = (2, case.num_pages, shape.num_kv_heads, page_size, head_dim)
    pages = torch.randn(size, device=DEVICE)
    for row in case.rows:
        # behind a tail there may be anything
        pages[:, row.tail.pages[-1], :, row.tail.length % page_size :] = torch.nan
    q = torch.randn(case.num_rows, heads[0], head_dim, device=DEVICE)
    rotation = build_rotation(RopeConfig(head_dim, rotary_dim), case.longest, DEVICE)
    whole = planned(case, shape, finishing=False)
    truth = merged(q.double(), pages.double(), whole, rotation, "reference")
    plain = merged(q, pages, whole, rotation, "reference")
    actual = merged(q, pages, planned(case, shape, finishing=True), rotation, how)
    assert_state_within_budget(actual, truth, plain, torch.float32)


def test_rows_with_much_of_their_own_are_read_by_launches() -> None:
    shape = AttentionShape(32, 8, 64, 16, 1, torch.float32)
    costs = costs_that_widen(64)
    planner = Planner(16, 32, 8, DEVICE, costs, finishing=True)
    for tail, finishing in ((256, True), (257, False)):
        rows = shared(shape, 24, 2048, tail=tail).rows
        work = planner.plan(rows, planner.group(rows, grouping=True), (), finish=True).work
        assert work is not None
        assert work.finishing is finishing


def test_states_that_others_join_hold_all_that_a_row_reads() -> None:
    shape = AttentionShape(32, 8, 64, 16, 1, torch.float32)
    planner = Planner(16, 32, 8, DEVICE, costs_that_widen(64), finishing=True)
    rows = shared(shape, 24, 2048).rows
    groups = planner.group(rows, grouping=True)
    work = planner.plan(rows, groups, ()).work
    assert work is not None
    assert not work.finishing
    assert int(work.row_state_indptr[-1]) == len(work.entry_row)


def test_a_list_or_a_rule_that_rows_are_not_finished_by_is_refused() -> None:
    q, (k, v) = torch.randn(1, 4, 32), torch.randn(2, 3, 2, 16, 32)
    work, table = one_item([1], [0], [(20, 12)]), angles(64, 32)
    states, out = AttnState(torch.zeros(1, 4, 32), torch.zeros(1, 4)), torch.empty_like(q)
    with pytest.raises(InvalidOption, match="use merge_states"):
        finish_rows(states, q, (k, v), work, table, RULE, out)
    finishing = replace(work, tiles=(Tile(16, 16, 4, 2, 1, finishing=True),), row_own=int32(0))
    with pytest.raises(InvalidOption, match="a plain rule"):
        finish_rows(states, q, (k, v), finishing, table, ScoreRule(0.2, window=3), out)
