"""A step that fails is computed request by request: only who can't be computed at all ends."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from looseleaf import LLM, Fuse, Select
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.scheduler import StepWork
from looseleaf.errors import EngineFault
from looseleaf.prompt.request import Request
from tests.engine.harness import Folder, assert_idle, document, drawn, make_llm, words

LEAD, A, B = words(1, 19), document(1, 40), document(2, 33)
POLICIES: list[dict[str, Any]] = [
    {},
    {"fuse": Fuse("question", ratio=0.3)},
    {"select": Select("quest", tokens=32, sink=0, recent=0, dense_layers=(0,), dense_below=0)},
    {"fuse": Fuse("first", tokens=4)},
    {},
]
Fails = Callable[[set[str]], bool]


def add_all(engine: Engine, name: str) -> list[RequestProgress]:
    """Requests of all kinds, of which the last has two outputs."""
    added = []
    for n, policy in enumerate(POLICIES):
        parts = engine.prompts.from_parts([LEAD, A, B, words(10 + n, 9)])
        params = drawn(n, max_tokens=6, n=2 if n == len(POLICIES) - 1 else 1)
        added.append(engine.add(Request(f"{name}{n}", parts, params, **policy)))
    return added


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check()
    assert_idle(llm)


def tokens(progress: RequestProgress) -> list[tuple[int, ...]]:
    return [output.token_ids for output in progress.output().outputs]


def break_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fails: Fails, *, late: bool
) -> list[int]:
    """Steps whose requests ``fails`` is true of raise, once they are computed if ``late``; returns
    how many requests each had."""
    run, broken = engine.runner.run, list[int]()

    def planted(work: StepWork, previous: Tensor | None = None) -> Tensor:
        sequences = [*work.decode, *work.choosing, *(chunk.sequence for chunk in work.chunks)]
        names = {sequence.request_id for sequence in sequences}
        if not fails(names):
            return run(work, previous)
        broken.append(len(names))
        if late:
            # keys are written, and tokens chosen, by then
            run(work, previous)
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.runner, "run", planted)
    return broken


@pytest.fixture
def right(checkpoint: Folder) -> list[list[tuple[int, ...]]]:
    """The tokens of all requests where nothing fails."""
    llm = make_llm(checkpoint())
    requests = add_all(llm.engine, "right")
    finish(llm)
    return [tokens(progress) for progress in requests]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("victim", range(len(POLICIES)))
@pytest.mark.parametrize("at_step", [0, 3])
def test_a_request_that_can_not_be_computed_ends_alone(
    checkpoint: Folder,
    right: list[list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    victim: int,
    at_step: int,
    late: bool,
) -> None:
    llm = make_llm(checkpoint())
    requests = add_all(llm.engine, "r")
    for _ in range(at_step):
        llm.engine.step()
    broken = break_steps(llm.engine, monkeypatch, lambda names: f"r{victim}" in names, late=late)
    finish(llm)
    assert broken.count(1) == 1 and (at_step == 0 or max(broken) > 1)
    for number, progress in enumerate(requests):
        if number == victim:
            assert isinstance(progress.error, EngineFault)
        else:
            assert progress.error is None
            assert tokens(progress) == right[number]


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_only_fails_with_all_of_its_requests_ends_none(
    checkpoint: Folder,
    right: list[list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    late: bool,
) -> None:
    """As one whose rows have no room on the device together."""
    llm = make_llm(checkpoint())
    requests = add_all(llm.engine, "r")
    broken = break_steps(llm.engine, monkeypatch, lambda names: len(names) > 1, late=late)
    finish(llm)
    assert len(broken) > 3
    assert [tokens(progress) for progress in requests] == right
    assert "each is computed alone: RuntimeError('planted')" in caplog.text
    assert llm.engine.counters.failed == 0


def test_what_rows_read_is_counted_once_where_they_are_computed_alone(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    for most in (len(POLICIES), 1):
        llm = make_llm(checkpoint())
        requests = add_all(llm.engine, "r")

        def fails(names: set[str], most: int = most) -> bool:
            return len(names) > most

        break_steps(llm.engine, monkeypatch, fails, late=True)
        finish(llm)
        counted.append([progress.output().select for progress in requests])
        assert llm.engine.counters.pages_read > 0
    assert counted[0] == counted[1]
