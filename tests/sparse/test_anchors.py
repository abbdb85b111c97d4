"""Layers that share a choice of pages, on every path of the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from looseleaf import LLM, Document, SamplingParams, Select
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.attention.select.anchors import choosing_layers
from looseleaf.attention.select.policy import Candidates, Choice
from looseleaf.config import PolicyFile
from looseleaf.errors import InvalidOption
from looseleaf.llm.load import reference_model
from looseleaf.ops.dispatch import Implementation
from looseleaf.sparse import Budget, Quest, SparsePolicy
from looseleaf.types import ScoreRule
from tests.attention.forests import PAGE_SIZE, STEPS, StepRecipe
from tests.engine.harness import words
from tests.sparse.policies import make
from tests.sparse.stage import HEAD_DIM, RULE, Stage

WINDOWED = ScoreRule(HEAD_DIM**-0.5, window=40)
RULES = (RULE, WINDOWED, RULE, WINDOWED, RULE)
FEW = Budget(pages=3, sink=1, recent=1)
each_path = pytest.mark.parametrize("path", ["native", "cpu", "reference"])


def test_a_layer_reads_the_choice_of_the_last_anchor_with_its_window() -> None:
    def of(anchors: tuple[int, ...] | None, dense: tuple[int, ...] = ()) -> tuple[int, ...]:
        return choosing_layers(anchors, dense, RULES)

    assert of(None) == of((0, 1, 2, 3, 4)) == of(()) == (0, 1, 2, 3, 4)
    assert of((0, 1)) == (0, 1, 0, 1, 0)
    # no earlier anchor has the window of layers 1 and 3
    assert of((0,)) == (0, 1, 0, 3, 0)
    # dense layers are no anchors
    assert of((0, 1, 2), dense=(0,)) == (0, 1, 2, 1, 2)


@each_path
@settings(max_examples=2)
@given(recipe=STEPS)
def test_anchors_at_every_layer_have_the_bits_of_a_choice_in_each(
    path: Implementation, recipe: StepRecipe
) -> None:
    stage = Stage.of(recipe, implementation=path, rules=RULES)
    alone = stage.answer(stage.selecting(make("quest", FEW)))
    every = make("quest", FEW, anchors=tuple(range(len(RULES))))
    assert torch.equal(stage.answer(stage.selecting(every)), alone)


@each_path
@pytest.mark.parametrize("budget", [Budget(), Budget(mass=1.0)])
@settings(max_examples=2)
@given(recipe=STEPS)
def test_a_full_budget_equals_dense_decode(
    path: Implementation, budget: Budget, recipe: StepRecipe
) -> None:
    stage = Stage.of(recipe, implementation=path, rules=RULES, patched=True)
    policy = make("quest", budget, anchors=(0, 1))
    assert torch.allclose(stage.answer(stage.selecting(policy)), stage.answer(), atol=1e-5)


class FirstChoice(SparsePolicy):
    """The choice of layer 0 in every layer, computed anew."""

    def choose(self, layer: int, q: Tensor, candidates: Candidates) -> Choice:
        return super().choose(0, q, candidates)


@each_path
@settings(max_examples=2)
@given(recipe=STEPS)
def test_a_layer_behind_an_anchor_reads_the_pages_of_the_anchor(
    path: Implementation, recipe: StepRecipe
) -> None:
    stage, other = (
        Stage.of(recipe, implementation=how, rules=(RULE,) * 3) for how in (path, "cpu")
    )
    shared, again = make("quest", FEW, anchors=(0,)), FirstChoice(Quest(), FEW)
    mine = stage.answer(stage.selecting(shared))
    assert torch.allclose(mine, other.answer(other.selecting(again)), atol=1e-5)
    # every step chooses anew
    assert torch.equal(stage.answer(stage.selecting(shared)), mine)


@each_path
@settings(max_examples=2)
@given(recipe=STEPS)
def test_rows_whose_dense_layers_differ_share_a_batch(
    path: Implementation, recipe: StepRecipe
) -> None:
    """The anchor's list does not have all rows of the layers that read its choice."""
    stage = Stage.of(recipe, implementation=path, rules=(RULE,) * 4)
    sharing = make("quest", FEW, anchors=(1,), dense_layers=frozenset({0}))
    apart = make("quest", FEW, dense_layers=frozenset({0, 1, 2}))
    rows = stage.selecting([(sharing, apart)[n % 2] for n in range(len(stage.rows))])
    together = stage.answer(rows)
    for index, row in enumerate(rows):
        assert torch.allclose(stage.answer([row])[:, 0], together[:, index], atol=1e-5)


def test_the_kernels_share_choices_as_the_cpu_does() -> None:
    """In the interpreter: a layer behind an anchor only stores its keys."""
    span, tail = ReadSpan(range(1, 6), 3, 5 * PAGE_SIZE - 3, 5), ReadSpan([20], 77, 2, 0)
    rows = [DecodeRow(78, (span,), tail)]
    answers = []
    for path in ("triton", "cpu"):
        stage = Stage(rows, (RULE, RULE), implementation=path)
        answers.append(stage.answer(stage.selecting(make("quest", FEW, anchors=(0,)))))
    assert torch.allclose(*answers, atol=1e-5)


def test_fewer_layers_choose_and_fewer_bytes_are_read_for_choices() -> None:
    span, tail = ReadSpan(range(1, 9), 3, 8 * PAGE_SIZE - 3, 8), ReadSpan([20, 21], 125, 17, 0)
    looked = []
    for path in ("native", "reference"):
        for anchors in (None, (0, 2)):
            stage = Stage([DecodeRow(141, (span,), tail)], (RULE,) * 4, implementation=path)
            stage.answer(stage.selecting(make("quest", FEW, anchors=anchors)))
            [selected] = stage.selected
            [read] = selected.reads()
            looked.append((read.looked_bytes, read.pages))
    every, shared = looked[:2]
    assert shared == (every[0] // 2, every[1]) and looked[2:] == looked[:2]


def test_requests_take_the_anchors_of_a_policy_file(tmp_path: Path) -> None:
    """Few keys are the same keys in every run; all keys equal dense decoding."""
    path, params = tmp_path / "policy.json", SamplingParams(max_tokens=12, temperature=0.0)
    model = reference_model("causal")
    plain = LLM(model, dtype="float32", device="cpu", num_pages=128)
    config = plain.engine.runner.model.config
    PolicyFile.of(config, None, anchors=(2,)).write(path)
    assert PolicyFile.read(path).anchors == (2,)
    filed = LLM(model, dtype="float32", device="cpu", num_pages=128, policy=str(path))
    prompt = [[Document(words(1, 300)), words(2, 60)]]
    few = Select("quest", tokens=64)

    def answer(llm: LLM, select: Select | None) -> tuple[int, ...]:
        return tuple(llm.generate(prompt, params, select=select)[0].outputs[0].token_ids)

    mine = answer(plain, replace(few, anchors=(2,)))
    assert answer(plain, replace(few, anchors=(2,))) == mine == answer(filed, few)
    full = replace(few, tokens=None, ratio=1.0, anchors=(2,), dense_below=0)
    assert answer(plain, full) == answer(plain, None)
    with pytest.raises(InvalidOption, match="go past the model's"):
        answer(plain, replace(few, anchors=(99,)))
    with pytest.raises(InvalidOption, match="layers can't share a choice"):
        plain.generate(prompt, params, select=replace(few, anchors=(2,)), revise=4)
    PolicyFile.of(config, None, anchors=(99,)).write(path)
    with pytest.raises(InvalidOption, match="policy has anchor 99"):
        LLM(model, device="cpu", policy=str(path))
    for changes, sentence in (
        ({"anchors": (4, 2)}, "anchors must be ascending"),
        ({"anchors": (2,), "layer_budgets": "pyramid"}, "have equal budgets"),
        ({"policy": "window", "anchors": (2,)}, "does not use anchors"),
    ):
        with pytest.raises(InvalidOption, match=sentence):
            replace(few, **changes)  # type: ignore[arg-type]
