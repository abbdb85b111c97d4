"""Requests drawn at random answer as each alone does: a short form of `tools.fuzz`."""

import random
from pathlib import Path

import pytest
from torch import Tensor

from looseleaf.engine.drawing import Draw, OnFault
from looseleaf.engine.drawing import Drawing as EngineDrawing
from looseleaf.engine.progress import OutputProgress
from tools.fuzz import Drawing, Fuzz, damage, parsed


def fuzz(seed: int, rounds: int) -> Fuzz:
    return Fuzz(parsed([f"--seed={seed}", f"--rounds={rounds}"]))


def test_mixes_answer_as_each_request_alone() -> None:
    run = fuzz(seed=11, rounds=6)
    assert run() == 0, run.found
    assert run.engines == 6 and run.asked > 20


def test_the_same_seed_draws_the_same() -> None:
    def drawn(seed: int) -> list[str]:
        drawing = Drawing(seed)
        return [f"{drawing.kind()} {drawing.ask()}" for _ in range(20)]

    assert drawn(3) == drawn(3) != drawn(4)


def test_a_fault_of_mixes_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = EngineDrawing.draw

    def swapped(
        self: EngineDrawing, outputs: list[OutputProgress], logits: Tensor, on_fault: OnFault
    ) -> list[Draw]:
        # right for whoever is alone
        return draw(self, outputs, logits.roll(1, 0), on_fault)

    monkeypatch.setattr(EngineDrawing, "draw", swapped)
    run = fuzz(seed=11, rounds=3)
    assert run() == 1 and run.found


def test_a_damaged_file_is_another_or_gone(tmp_path: Path) -> None:
    path, content, seen = tmp_path / "file", bytes(range(200)), set[str]()
    for seed in range(20):
        path.write_bytes(content)
        damage(path, random.Random(seed))
        found = path.read_bytes() if path.exists() else None
        assert found != content
        seen.add("gone" if found is None else "cut" if len(found) < len(content) else "flipped")
    assert seen == {"gone", "cut", "flipped"}
