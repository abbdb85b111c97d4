"""Tokens that deviation chose go on from their check layer in the pass of their request, whoever
else is in its steps and however it is cut."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf import LLM, Fuse
from looseleaf.blend import token_scoring as evidence
from looseleaf.blend.watched import ChunkStep
from looseleaf.engine.runner import runner as running
from looseleaf.engine.runner import step as stepping
from looseleaf.engine.runner.step import step_rows
from looseleaf.graphs.layerwise import LateRows
from looseleaf.graphs.rows import RowInputs
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_engine
from looseleaf.prompt.request import Request
from tests.checkpoints import make_checkpoint
from tests.engine.fused import LEAD, PARAMS, SEVERAL, Blended, blend_all, same
from tests.engine.harness import Recorder, assert_idle, make_llm, words, worst
from tests.engine.test_graph_steps import Passes

# what a layer before is blended with, and what it is not, differ from layer 2 on
DEEP = Fuse("deviation", ratio=0.3, check_layers=(4,))
ASKED: list[Any] = [
    ([words(9, 12)], None),
    (SEVERAL, Fuse("deviation", ratio=0.3, check_layers=(1,))),
    ([*SEVERAL[:-1], words(6, 12)], DEEP),
    ([LEAD, *reversed(SEVERAL[1:3]), words(5, 5)], Fuse("random", ratio=0.5)),
    ([*SEVERAL[:-1], words(7, 3)], Fuse("deviation", ratio=0.4, check_layers=(1, 4))),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=6)


def engine(folder: Path, *, passes: bool, **options: Any) -> LLM:
    """One that computes its evidence whole, or has it end at the last check layer."""
    llm = make_llm(folder)
    config = {"dtype": "float32", "device": "cpu", "num_pages": 96, **options}
    llm.engine = load_engine(folder, make_config(config), implementation="reference")
    runner = llm.engine.runner
    if passes:
        runner = replace(runner, passes=Passes(runner.model, runner.attention))
    llm.engine.runner = Recorder(runner)  # type: ignore[assignment]
    return llm


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Blended]:
    llm = engine(folder, passes=False)
    return [blend_all(llm, [one])[0] for one in ASKED]


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}])
def test_rows_enter_late_in_steps_of_any_kind_with_the_same_answers(
    folder: Path,
    alone: list[Blended],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late: list[int] = []
    enter = running.enter_late

    def counted(entering: Sequence[LateRows], slots: Tensor) -> Any:
        late.extend(some.layer for some in entering)
        return enter(entering, slots)

    monkeypatch.setattr(running, "enter_late", counted)
    llm = engine(folder, passes=True, **options)
    together = blend_all(llm, ASKED)
    apart = [blend_all(llm, [one])[0] for one in ASKED]
    for mine, expected in zip([*together, *apart], [*alone, *alone], strict=True):
        same(mine, expected)
    # in steps that have others' rows in them, and in those that replay
    passes: Any = llm.engine.runner.passes
    assert 4 in late and {key.enters for key in passes._passes} >= {1, 4}


def test_rows_that_are_many_go_on_by_themselves_with_the_same_answers(
    folder: Path, alone: list[Blended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or those that would pass many layers in vain."""
    monkeypatch.setattr(evidence, "_TEXT_PASS_ROWS", 0)
    llm = engine(folder, passes=True)
    for one, expected in zip(ASKED, alone, strict=True):
        same(blend_all(llm, [one])[0], expected)
    passes: Any = llm.engine.runner.passes
    assert {key.enters for key in passes._passes} == {None}


def test_who_makes_room_between_choosing_and_its_pass_answers_the_same(
    folder: Path, alone: list[Blended]
) -> None:
    prompt, fuse = ASKED[2]
    llm = engine(folder, passes=True)
    parts = llm.engine.prompts.from_parts(prompt)
    sequence = llm.engine.add(Request("a", parts, PARAMS, fuse=fuse)).outputs[0].sequence
    fusion = sequence.fusion
    assert fusion is not None
    while fusion.begun is None:
        llm.engine.step()
    llm.engine._ahead = None
    llm.engine._scheduler._preempt(sequence)
    assert not fusion.chosen
    while llm.engine.has_work:
        llm.engine.step()
    assert_idle(llm)
    recorder: Any = llm.engine.runner
    assert fusion.chosen_positions == alone[2].chosen
    assert worst(recorder.logits["a", 0][0], alone[2].logits[0]) < 1e-4


def test_the_numbers_of_rows_lie_in_one_piece(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Kernels read them as they are: a step that had to copy them would do so in every layer."""
    steps, watched = [], []

    def rows(*args: Any) -> RowInputs:
        made = step_rows(*args)
        steps.append(made.to(torch.device("cpu")))
        return made

    def step(*args: Any) -> ChunkStep:
        made = ChunkStep(*args)
        watched.append((made.slots, made.frame_positions))
        return made

    monkeypatch.setattr(stepping, "step_rows", rows)
    monkeypatch.setattr(evidence, "ChunkStep", step)
    for one in [*ASKED, (SEVERAL, Fuse("question", ratio=0.3))]:
        blend_all(engine(folder, passes=False), [one])
    assert len(steps) > len(ASKED) and len(watched) > 2
    for numbers in [*steps, *watched]:
        assert all(some.is_contiguous() for some in numbers)
