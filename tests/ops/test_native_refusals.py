"""The C kernels read by address: what is not there is refused with a sentence, never read."""

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.partial_attention import WorkList, partial_attention
from looseleaf.ops.partial_attention.native import NativePlan, Phase
from looseleaf.types import AttnState, Rotation, ScoreRule
from tests.ops.small_lists import angles, int32, one_item

HEADS, DIM = 2, 32
RULE, TURN = ScoreRule(DIM**-0.5), angles(100, DIM)
K, V = torch.ones(2, 4, HEADS, 16, DIM)
WORK = one_item([1, 2], [0, 16], [(40, 20), (41, 20)])
Q = torch.ones(2, 4, DIM)


def attend(
    work: WorkList = WORK,
    rotation: Rotation = TURN,
    rule: ScoreRule = RULE,
    slot_positions: Tensor | None = None,
) -> AttnState:
    return partial_attention(Q, K, V, work, rotation, rule, slot_positions, "native")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"page_indices": int32(1, -1)}, "a page is not in the pool"),
        ({"page_indices": int32(1, 4)}, "a page is not in the pool"),
        ({"row_positions": int32(40, 100)}, "a position is outside the rotation table"),
        ({"entry_row": int32(0, 2)}, "a row has no query or no position"),
        ({"entry_row": int32(0, -1)}, "a row has no query or no position"),
        ({"entry_state": int32(0, 2)}, "a state is not below the number of states"),
        ({"entry_state": int32(-1, 1)}, "a state is not below the number of states"),
        ({"num_items": int32(2)}, "exceed the length of the lists"),
        ({"item_page_indptr": int32(0, 3)}, "exceed the length of the lists"),
        ({"item_page_indptr": int32(-1, 2)}, "exceed the length of the lists"),
        ({"item_entry_indptr": int32(0, 3)}, "exceed the length of the lists"),
    ],
)
def test_a_list_that_names_what_is_not_there_is_refused(
    change: dict[str, Tensor], sentence: str
) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        attend(replace(WORK, **change))


def test_a_row_before_its_frame_needs_no_angle() -> None:
    state = attend(replace(WORK, row_positions=int32(-5, 41)))
    assert state.out.isfinite().all()


def test_after_a_refusal_the_next_call_is_right() -> None:
    expected = attend()
    with pytest.raises(InvalidOption):
        attend(replace(WORK, page_indices=int32(1, 9)))
    assert torch.equal(attend().out, expected.out)


@pytest.mark.parametrize("name", ["page_indices", "entry_bound", "row_positions", "num_items"])
def test_lists_of_another_dtype_or_with_gaps_are_refused(name: str) -> None:
    mine = getattr(WORK, name)
    with pytest.raises(InvalidOption, match=f"{name} is torch.int64"):
        attend(replace(WORK, **{name: mine.long()}))
    if len(mine) > 1:
        with pytest.raises(InvalidOption, match=f"{name} is .*without gaps"):
            attend(replace(WORK, **{name: mine.repeat_interleave(2)[::2]}))


def test_floats_of_another_dtype_or_with_gaps_are_refused() -> None:
    with pytest.raises(InvalidOption, match="cos must be float32"):
        attend(rotation=Rotation(TURN.cos.double(), TURN.sin.double()))
    with pytest.raises(InvalidOption, match="cos must be float32"):
        attend(rotation=Rotation(TURN.cos.T.contiguous().T, TURN.sin))
    with pytest.raises(InvalidOption, match="larger heads"):
        attend(rotation=angles(100, 2 * DIM))
    with pytest.raises(InvalidOption, match="alibi_slopes must be float32"):
        attend(rule=ScoreRule(0.1, alibi_slopes=torch.ones(4).half()))
    with pytest.raises(InvalidOption, match="alibi_slopes must be float32"):
        attend(rule=ScoreRule(0.1, alibi_slopes=torch.ones(8)[::2]))


def test_positions_of_slots_are_those_of_the_pages() -> None:
    work = replace(WORK, item_explicit=int32(1))
    places = torch.arange(64, dtype=torch.int32).view(4, 16)
    attend(work, slot_positions=places)
    plan = NativePlan(TURN, RULE, 4, K, work=work, slot_positions=places)
    with pytest.raises(InvalidOption, match="4 at most"):
        plan.find_pages(torch.cat([K, K]), torch.cat([V, V]))
    with pytest.raises(InvalidOption, match="8 slots a page"):
        # callers without the type checks of the tests get the sentence
        inspect.unwrap(NativePlan.__init__)(
            plan, TURN, RULE, 4, K, work=work, slot_positions=places[:, :8]
        )
    with pytest.raises(InvalidOption, match=r"slot_positions is torch.int64"):
        attend(work, slot_positions=places.long())


def plan_of(work: WorkList | None = WORK) -> NativePlan:
    plan = NativePlan(TURN, RULE, 4, K, work=work)
    # no phase: later calls have these pages
    plan.run(Phase(0), pages=plan.find_pages(K.clone(), V.clone()))
    return plan


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.half(),
        lambda x: x[..., :16],
        lambda x: x[:, :1],
        lambda x: x[:1],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    ],
)
def test_rows_are_those_that_the_kernels_were_made_for(spoil: Callable[[Tensor], Tensor]) -> None:
    plan, out, kv = plan_of(), torch.empty(2, 4, DIM), torch.ones(2, HEADS, DIM)
    plan.point_rows(torch.tensor([3, 20]), torch.tensor([0, 1]))
    plan.run(Phase.STORE | Phase.PARTIAL | Phase.MERGE, Q, (kv, kv), out)
    with pytest.raises(InvalidOption, match=r"q, must have|no query"):
        plan.run(Phase.PARTIAL, spoil(Q))
    for pair in ((spoil(kv), kv), (kv, spoil(kv))):
        with pytest.raises(InvalidOption, match="k and v, 2 rows"):
            plan.run(Phase.STORE, kv=pair)
    with pytest.raises(InvalidOption, match="out, 2 dense rows"):
        plan.run(Phase.MERGE, out=spoil(out))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.half(),
        lambda x: x[..., :16],
        lambda x: x[:, :1],
        lambda x: x[:, :, :8],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    ],
)
def test_pages_are_those_that_the_kernels_were_made_for(spoil: Callable[[Tensor], Tensor]) -> None:
    plan, unchecked = plan_of(), inspect.unwrap(NativePlan.find_pages)
    for pair in ((spoil(K), V), (K, spoil(V)), (spoil(K), spoil(V))):
        with pytest.raises(InvalidOption, match="pages of K and V"):
            unchecked(plan, *pair)


@pytest.mark.parametrize(
    ("slot", "position", "sentence"),
    [
        (4 * 16, 0, "a page is not in the pool"),
        (3, 100, "a position is outside the rotation table"),
        (3, -1, "a position is outside the rotation table"),
    ],
)
def test_a_key_that_has_no_slot_or_no_angle_is_not_stored(
    slot: int, position: int, sentence: str
) -> None:
    plan, kv = plan_of(None), torch.ones(1, HEADS, DIM)
    plan.point_rows(torch.tensor([slot]), torch.tensor([position]))
    with pytest.raises(InvalidOption, match=sentence):
        plan.run(Phase.STORE, kv=(kv, kv))


def test_rows_are_pointed_to_by_int64() -> None:
    with pytest.raises(InvalidOption, match="int64"):
        plan_of().point_rows(int32(3), int32(0))


def test_a_merge_of_states_that_are_not_there_is_refused() -> None:
    plan = plan_of(replace(WORK, row_state_indptr=int32(0, 1, 3)))
    with pytest.raises(InvalidOption, match="a state is not below the number of states"):
        plan.run(Phase.PARTIAL | Phase.MERGE, Q, out=torch.empty(2, 4, DIM))


def test_a_bitmap_that_is_too_short_hides_nothing_behind_its_end() -> None:
    work = replace(WORK, entry_mask=int32(0, 0), mask_words=int32(0))
    whole = replace(work, mask_words=int32(0, 0))
    assert torch.equal(attend(work).out, attend(whole).out)
