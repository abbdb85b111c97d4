"""Tokens that deviation chose go on from their check layer in the pass of their request, whoever
else is in its steps and however it is cut."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from looseleaf import LLM, Fuse
from looseleaf.engine import runner as running
from looseleaf.engine.entering import Entering
from looseleaf.engine.fusion import Fusion
from looseleaf.engine.llm import make_config
from looseleaf.engine.loading import load_engine
from tests.engine.fused import LEAD, PARAMS, SEVERAL, Blended, blend_all, same
from tests.engine.harness import Folder, Recorder, document, make_llm, words
from tests.engine.test_graph_steps import Passes


def engine(folder: Folder, *, passes: bool, **options: Any) -> LLM:
    """One that computes its evidence whole, or has it end at the last check layer."""
    llm = make_llm(folder("llama"))
    config = {"dtype": "float32", "device": "cpu", "num_pages": 96, **options}
    llm.engine = load_engine(folder("llama"), make_config(config), implementation="reference")
    runner = llm.engine.runner
    if passes:
        runner = replace(runner, passes=Passes(runner.model, runner.attention))
    llm.engine.runner = Recorder(runner)  # type: ignore[assignment]
    return llm


ASKED: list[Any] = [
    ([words(9, 12)], None),
    (SEVERAL, Fuse("deviation", ratio=0.3, check_layers=(1,))),
    ([*SEVERAL[:-1], words(6, 12)], Fuse("deviation", ratio=0.3, check_layers=(2,))),
    ([LEAD, *reversed(SEVERAL[1:3]), words(5, 5)], Fuse("random", ratio=0.5)),
    ([*SEVERAL[:-1], words(7, 3)], Fuse("deviation", ratio=0.4, check_layers=(1, 2))),
]


@pytest.fixture
def alone(checkpoint: Folder) -> list[Blended]:
    return [blend_all(engine(checkpoint, passes=False), [one])[0] for one in ASKED]


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}])
def test_rows_enter_late_in_steps_of_any_kind_with_the_same_answers(
    checkpoint: Folder,
    alone: list[Blended],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late: list[int] = []
    enter = running.enter_late

    def counted(entering: Sequence[Entering], slots: Tensor) -> Any:
        late.extend(some.layer for some in entering)
        return enter(entering, slots)

    monkeypatch.setattr(running, "enter_late", counted)
    llm = engine(checkpoint, passes=True, **options)
    together = blend_all(llm, ASKED)
    apart = [blend_all(llm, [one])[0] for one in ASKED]
    for mine, expected in zip([*together, *apart], [*alone, *alone], strict=True):
        same(mine, expected)
    # in steps that have others' rows in them, and in those that replay
    passes: Any = llm.engine.runner.passes
    assert set(late) >= {2} and {key.enters for key in passes._passes} >= {1, 2}


def test_who_makes_room_before_or_behind_its_pass_answers_the_same(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(PARAMS, max_tokens=40)
    asked: list[Any] = [
        (
            [LEAD, document(1, 23), document(n, 19), words(n, 9)],
            Fuse("deviation", ratio=0.3, check_layers=(2,)),
        )
        for n in (2, 3, 4)
    ]
    alone = [blend_all(engine(checkpoint, passes=False), [one], long)[0] for one in asked]
    stale: list[bool] = []
    reset = Fusion.reset

    def listen(self: Fusion) -> None:
        reset(self)
        stale.append(self.stale)

    monkeypatch.setattr(Fusion, "reset", listen)
    llm = engine(checkpoint, passes=True, num_pages=22)
    for mine, expected in zip(blend_all(llm, asked, long), alone, strict=True):
        same(mine, expected)
    assert llm.engine.counters.preemptions > 0 and any(stale)
