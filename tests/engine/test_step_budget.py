"""A goal for the duration of a step: long prompts enter in small chunks beside running outputs."""

from typing import Any

import pytest

from looseleaf.engine.step_budget import LEAST_ROWS, StepBudget
from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.prompt.request import Request
from tests.engine.harness import Folder, drawn, make_llm, words


@pytest.mark.parametrize("step_ms", [None, 0.001, 1e6])
def test_prefill_beside_running_outputs_fits_the_goal(
    checkpoint: Folder, step_ms: float | None
) -> None:
    llm = make_llm(checkpoint(), step_ms=step_ms)
    engine = llm.engine

    def add(name: str, length: int) -> Any:
        parts = engine.prompts.from_parts([words(length, length)])
        return engine.add(Request(name, parts, drawn(length, max_tokens=20)))

    # without running outputs a prompt enters at once
    running = add("running", 200)
    engine.step()
    assert engine.last_step is not None and engine.last_step.prompt_tokens >= 190
    entering, chunks = add("entering", 220), list[int]()
    while engine.has_work:
        engine.step()
        chunks.append(engine.last_step.prompt_tokens)
    assert sum(chunks) >= 210
    assert max(chunks) == LEAST_ROWS if step_ms == 0.001 else max(chunks) >= 210
    assert running.finished and entering.finished
    (alone,) = llm.generate([[words(220, 220)]], drawn(220, max_tokens=20))
    assert alone.token_ids == entering.output().token_ids


def test_a_budget_is_the_rest_of_the_goal_in_rows() -> None:
    compute_time = ComputeTime()
    budget = StepBudget(0.05, compute_time)
    assert budget.rows([], 100) == LEAST_ROWS
    for rows, pairs in ((100, 5_000), (1000, 500_000), (300, 300_000)):
        compute_time.observe(rows, pairs, 0.01 + 1e-5 * rows + 1e-7 * pairs)
    # 40 ms are left; a row takes 10 µs, and its 100 keys 10 µs
    assert budget.rows([], 100) == pytest.approx(2000, rel=0.05)


def test_a_long_decode_leaves_the_time_of_prefill_known() -> None:
    compute_time = ComputeTime()

    def observe(rows: int, pairs: int) -> None:
        compute_time.observe(rows, pairs, 0.005 + 2e-5 * rows + 1e-9 * pairs)

    for rows in (256, 1024, 4096):
        observe(rows, rows * rows // 2)
    for step in range(2000):
        # a decode step of one row says nothing of the time of a row
        compute_time.observe(1, 500 + step, 0.006)
    assert compute_time.predict(4096, 4096 * 2048) == pytest.approx(0.095, rel=0.1)
