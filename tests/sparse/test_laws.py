"""The laws of selection, for every policy and on every path of the CPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.attention.select.policy import SelectingRow
from looseleaf.config import LayerBudgets
from looseleaf.ops.dispatch import Implementation
from looseleaf.sparse import Budget, SparsePolicy
from looseleaf.types import ScoreRule
from tests.attention.forests import PAGE_SIZE, STEPS, StepRecipe
from tests.sparse.policies import POLICIES, REVISED, make
from tests.sparse.stage import HEAD_DIM, RULE, Stage

WINDOWED = ScoreRule(HEAD_DIM**-0.5, window=40)
CAPPED = ScoreRule(HEAD_DIM**-0.5, soft_cap=2.0)
RULES = [(RULE, WINDOWED), (CAPPED,)]
each_policy = pytest.mark.parametrize("name", POLICIES)
SPREAD = (9.0, 1.0)
"""Budgets of the two layers, that are as different as they can be."""
each_path = pytest.mark.parametrize("path", ["native", "cpu"])


@each_path
@each_policy
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("rules", RULES)
@settings(max_examples=3)
@given(recipe=STEPS)
def test_a_full_budget_equals_dense_decode(
    name: str,
    path: Implementation,
    rules: tuple[ScoreRule, ...],
    patched: bool,
    recipe: StepRecipe,
) -> None:
    stage = Stage.of(recipe, implementation=path, patched=patched, rules=rules)
    dense = stage.answer()
    assert torch.allclose(stage.answer(stage.selecting(make(name))), dense, atol=1e-5)


@each_policy
@settings(max_examples=4)
@given(recipe=STEPS)
def test_layers_that_are_dense_have_the_bits_of_dense_decode(name: str, recipe: StepRecipe) -> None:
    stage = Stage.of(recipe)
    policy = make(name, Budget(pages=1), dense_layers=frozenset({0}))
    assert torch.equal(stage.answer(stage.selecting(policy))[0], stage.answer()[0])


@settings(max_examples=8)
@given(recipe=STEPS)
def test_a_batch_of_policies_equals_one_at_a_time(recipe: StepRecipe) -> None:
    stage = Stage.of(recipe)
    budgets = (Budget(pages=3), Budget(ratio=0.4, sink=1, recent=2))
    policies = [None, *(make(name, budget) for name in POLICIES for budget in budgets)]
    rows = stage.selecting([policies[n % len(policies)] for n in range(len(stage.rows))])
    together = stage.answer(rows)
    for index, row in enumerate(rows):
        assert torch.allclose(stage.answer([row])[:, 0], together[:, index], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "layers"),
    [*((name, "flat") for name in POLICIES), ("quest", SPREAD), (REVISED, SPREAD)],
)
@pytest.mark.parametrize("patched", [False, True])
@settings(max_examples=3)
@given(recipe=STEPS)
def test_choosing_in_the_work_list_equals_joining_what_was_chosen(
    name: str, layers: LayerBudgets, patched: bool, recipe: StepRecipe
) -> None:
    """What a GPU does, by its references, and what the CPU does."""
    budget = Budget(pages=3, sink=1, recent=1)
    listed, joined = (
        Stage.of(recipe, implementation=path, patched=patched, rules=(RULE, WINDOWED))
        for path in ("reference", "cpu")
    )
    mine = listed.answer(listed.selecting(make(name, budget, layer_budgets=layers)))
    other = joined.answer(joined.selecting(make(name, budget, layer_budgets=layers)))
    assert torch.allclose(mine, other, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "layers"), [("quest", "flat"), (REVISED, "flat"), (REVISED, SPREAD)]
)
def test_the_kernels_choose_what_the_cpu_does(name: str, layers: LayerBudgets) -> None:
    """In the interpreter, over several spans, with a patch and a window."""
    shared = ReadSpan(range(1, 9), 3, 8 * PAGE_SIZE - 3, 8)
    second = ReadSpan(range(9, 12), 3 + 8 * PAGE_SIZE, 3 * PAGE_SIZE - 1, 3)
    tails = [ReadSpan([20, 21, 22], 12 * PAGE_SIZE, 2 * PAGE_SIZE + 2, 0)]
    tails += [ReadSpan([30, 31], 9 * PAGE_SIZE, PAGE_SIZE + 1, 0)]
    rows = [
        DecodeRow(14 * PAGE_SIZE + 1, (shared, second), tails[0]),
        DecodeRow(10 * PAGE_SIZE, (shared,), tails[1]),
    ]
    answers = []
    for path in ("triton", "cpu"):
        stage = Stage(rows, (RULE, WINDOWED), implementation=path, patched=True)
        budget = Budget(pages=5, sink=1, recent=1)
        # what is spread is spread over both layers
        dense = frozenset({0} if layers == "flat" else ())
        policy = make(name, budget, dense_layers=dense, layer_budgets=layers)
        answers.append(stage.answer(stage.selecting(policy)))
    assert torch.allclose(*answers, atol=1e-5)


TOKENS = [Budget(pages=pages) for pages in (2, 3, 5, 9)]
SHARES = [Budget(ratio=ratio) for ratio in (0.1, 0.3, 0.6, 1.0)]
MASSES = [Budget(mass=mass) for mass in (0.1, 0.4, 0.8, 1.0)]


@pytest.mark.parametrize(
    ("name", "layers", "budgets"),
    [
        *((name, "flat", budgets) for name in POLICIES for budgets in (TOKENS, SHARES)),
        *((name, "flat", MASSES) for name in POLICIES if name != "window"),
        ("quest", "pyramid", TOKENS),
    ],
)
@settings(max_examples=3)
@given(recipe=STEPS)
def test_a_larger_budget_recovers_no_less_of_the_attention(
    name: str, layers: LayerBudgets, budgets: list[Budget], recipe: StepRecipe
) -> None:
    stage = Stage.of(recipe)
    before = None
    for budget in budgets:
        rows = stage.selecting(make(name, budget, layer_budgets=layers))
        measured = [
            replace(row, measured=True) if isinstance(row, SelectingRow) else row for row in rows
        ]
        stage.answer(measured)
        if not stage.selected:
            return
        [selected] = stage.selected
        held = torch.tensor([read.recall for read in selected.reads()])
        assert (held <= 1 + 1e-5).all()
        assert before is None or (held >= before - 1e-5).all()
        before = held


def test_kv_heads_choose_apart() -> None:
    """Keys that only one head of two wants are read by that head alone."""
    span = ReadSpan(list(range(1, 9)), 0, 8 * PAGE_SIZE, 8)
    tail = ReadSpan([9], 8 * PAGE_SIZE, 1, 0)
    stage = Stage([DecodeRow(8 * PAGE_SIZE, (span,), tail)], rules=(RULE,))
    k_pages, _ = stage.pool.layer(0)
    k_pages.zero_()
    rows = stage.selecting(make("quest", Budget(pages=2)))
    policy = make("quest", Budget(pages=2))
    # a dim that turns so slowly that the frame does not matter
    slow = HEAD_DIM // 2 - 1
    k_pages[3, 0, 5, slow] = k_pages[6, 1, 2, slow] = 50.0
    stage.q.zero_()
    stage.q[..., slow] = 1.0
    stage.kv[0].zero_()
    stage.answer(rows)
    [selected] = stage.selected
    assert isinstance(policy, SparsePolicy)
    choice = policy.choose(0, stage.q, selected.candidates)
    assert choice.ordinals[0, :, 0].tolist() == [2, 5]


def test_a_budget_of_mass_counts_scores_as_they_are_capped() -> None:
    """One page has all mass by its scores, and hardly more than any other by what is left of them
    under a low cap."""
    span, tail = ReadSpan(range(1, 9), 0, 8 * PAGE_SIZE, 0), ReadSpan([9], 8 * PAGE_SIZE, 1, 0)
    counts = []
    for rule in (RULE, replace(RULE, soft_cap=1e-3)):
        stage = Stage([DecodeRow(8 * PAGE_SIZE, (span,), tail)], rules=(rule,))
        k_pages, _ = stage.pool.layer(0)
        k_pages.zero_()
        slow = HEAD_DIM // 2 - 1
        k_pages[3, :, 5, slow] = 500.0
        stage.q.zero_()
        stage.q[..., slow] = 1.0
        stage.kv[0].zero_()
        policy = make("quest", Budget(mass=0.5))
        stage.answer(stage.selecting(policy))
        [selected] = stage.selected
        assert isinstance(policy, SparsePolicy)
        counts.append(policy.choose(0, stage.q, selected.candidates).counts.tolist())
    assert counts == [[[1, 1]], [[4, 4]]]
