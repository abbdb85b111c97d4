"""The laws of selection, for every policy and on every path of the CPU."""

import pytest
import torch
from hypothesis import given, settings

from looseleaf.ops.dispatch import Implementation
from looseleaf.sparse import Budget
from looseleaf.types import ScoreRule
from tests.attention.forests import STEPS, StepRecipe
from tests.sparse.policies import SCORERS, make
from tests.sparse.stage import HEAD_DIM, RULE, Stage

WINDOWED = ScoreRule(HEAD_DIM**-0.5, window=40)
CAPPED = ScoreRule(HEAD_DIM**-0.5, soft_cap=2.0)
RULES = [(RULE, WINDOWED), (CAPPED,)]
each_policy = pytest.mark.parametrize("name", SCORERS)
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
    policies = [None, *(make(name, budget) for name in SCORERS for budget in budgets)]
    rows = stage.selecting([policies[n % len(policies)] for n in range(len(stage.rows))])
    together = stage.answer(rows)
    for index, row in enumerate(rows):
        assert torch.allclose(stage.answer([row])[:, 0], together[:, index], atol=1e-5)
