"""Engines that are made, mixed and closed again and again in one process answer as one that is
alone: a short form of `tools.stress`."""

import argparse

import pytest

from tools import stress
from tools.stress import Stress


def options(**others: object) -> argparse.Namespace:
    """What the tool takes, for a few seconds of a CPU."""
    given = {"device": "cpu", "document": 60, "tokens": 3, "rounds": 4, **others}
    return stress.parsed([f"--{name}={value}" for name, value in given.items()])


def test_engines_of_every_kind_answer_as_one_that_is_alone() -> None:
    run = Stress(options(seed=3))
    assert run() == 0, run.failures
    # it did what it is for; how many documents are in a tier in time is not always the same
    assert run.loads and run.engines > 3 and run.answers > 50


def test_an_answer_that_is_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Stress(options(seed=3, rounds=1))
    compute_expected = run.compute_expected

    def mistaken(fp8: bool) -> None:
        compute_expected(fp8)
        # as if the first answers had been those to other questions
        keys = [key for key in run.expected if key[0] == fp8]
        answers = [run.expected[key] for key in keys]
        run.expected.update(zip(keys, [*answers[1:], answers[0]], strict=True))

    monkeypatch.setattr(run, "compute_expected", mistaken)
    assert run() == 1 and run.failures
