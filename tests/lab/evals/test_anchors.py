"""Anchor layers by calibration: the least loss of attention, and a file that engines take."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from looseleaf import LLM, Select
from looseleaf.config import PolicyFile
from looseleaf.errors import InvalidOption
from looseleaf.llm.load import reference_model
from looseleaf_lab.cli.evals.calibrate import calibrate
from looseleaf_lab.evals.distance.overlap import best_anchors
from looseleaf_lab.evals.distance.selection import SelectionMeter
from looseleaf_lab.evals.world_tasks import NeedleTask


def test_anchors_lose_no_more_than_any_others() -> None:
    losses = np.triu(np.random.default_rng(0).random((8, 8)), 1)
    layers = [1, 2, 4, 5, 6, 7]

    def total(anchors: tuple[int, ...]) -> float:
        return sum(losses[max(a for a in anchors if a <= layer), layer] for layer in layers)

    for count in (1, 2, 3, 6):
        each = [(1, *rest) for rest in combinations(layers[1:], count - 1)]
        best = best_anchors(losses, layers, count)
        assert best in each and total(best) == pytest.approx(min(map(total, each)))


def test_a_choice_of_its_own_loses_nothing_and_dense_layers_have_no_figure() -> None:
    llm = LLM(reference_model("causal"), dtype="float32", device="cpu", num_pages=200)
    select = Select("quest", ratio=0.1, dense_layers=(0,), dense_below=0)
    losses = SelectionMeter(llm, "causal").losses(NeedleTask(300).items(range(1)), select)
    assert np.isnan(losses[0]).all() and np.isnan(losses[:, 0]).all()
    own = losses[1:, 1:]
    assert np.abs(np.diag(own)).max() == 0 and own[0, 1:].max() > 0
    assert np.abs(own).max() <= 1


def test_the_command_adds_anchors_to_the_policy_file(tmp_path: Path) -> None:
    questions, path = tmp_path / "needles.jsonl", tmp_path / "policy.json"
    lines = [
        {
            "question": item.question,
            "answers": item.answers,
            "documents": [{"title": "", "text": text} for text in item.documents],
        }
        for item in NeedleTask(200).items(range(2))
    ]
    questions.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    flags = ["--checkpoint", "causal", "--dtype", "float32", "--anchors-at", "0.2"]
    refused = CliRunner().invoke(calibrate, flags)
    assert isinstance(refused.exception, InvalidOption) and "--save" in str(refused.exception)
    model = LLM(reference_model("causal"), device="cpu").engine.runner.model.config
    PolicyFile.of(model, None, ("Some text.",)).write(path)
    flags += ["--file", str(questions), "--save", str(path)]
    result = CliRunner().invoke(calibrate, flags, catch_exceptions=False)
    policy = PolicyFile.read(path)
    assert policy.primer == ("Some text.",)
    if policy.anchors is None:
        assert "every layer chooses" in result.output
    else:
        assert policy.anchors[0] == 2 and policy.measured["anchors"]["questions"] == 1
        assert f"layers {' '.join(map(str, policy.anchors))} choose" in result.output
    LLM(reference_model("causal"), device="cpu", policy=str(path)).engine.close()
