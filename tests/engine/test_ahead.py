"""Running one step ahead of the tokens changes nothing but when things happen.

What a GPU does is done here on the CPU: the next step is launched before the last one's tokens are
looked at, and reads them from where they were sampled."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from looseleaf import LLM, SamplingParams
from looseleaf.engine.runner.runner import Runner
from looseleaf.engine.scheduler import StepWork
from looseleaf.prompt.request import Prompt, Request
from tests.engine.harness import GREEDY, Folder, assert_idle, document, drawn, make_llm, words

PROMPTS: list[Prompt] = [
    [words(1, 20), document(1), document(2), words(2, 9)],
    words(3, 40),
    [words(1, 20), document(2), words(4, 17)],
    [words(1, 20), document(3, 50), document(1), words(5, 3)],
    words(3, 47),
]
PARAMS = [
    drawn(1, 30),
    dataclasses.replace(GREEDY, max_tokens=40),
    drawn(2, 25, logprobs=2, repetition_penalty=1.3),
    drawn(3, 1),
    drawn(4, 40, min_tokens=3, top_p=0.8, n=2),
]


class Ahead:
    """A runner that runs ahead, and counts the steps that read tokens nobody had seen."""

    def __init__(self, runner: Runner) -> None:
        self.runner = dataclasses.replace(runner, runs_ahead=True)
        self.unseen = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def run(self, work: StepWork, previous: Tensor | None = None) -> Any:
        self.unseen += any(sequence.tail.tokens[-1] < 0 for sequence in work.decode)
        return self.runner.run(work, previous)


def ahead(llm: LLM) -> Ahead:
    runner: Any = llm.engine.runner
    llm.engine.runner = Ahead(runner.runner)  # type: ignore[assignment]
    assert isinstance(llm.engine.runner, Ahead)
    return llm.engine.runner


def answers(
    llm: LLM, params: Sequence[SamplingParams], arrivals: Sequence[int]
) -> list[list[tuple[object, ...]]]:
    """Tokens and ends of all outputs; request ``n`` arrives before step ``arrivals[n]``."""
    engine, added = llm.engine, {}
    for step in range(1000):
        for number, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)):
            if arrivals[number] == step:
                parts = engine.prompts.from_parts(prompt)
                added[number] = engine.add(Request(f"r{number}", parts, one))
        if len(added) == len(PROMPTS) and not engine.has_work:
            break
        engine.step()
        engine.check()
    assert_idle(llm)
    outputs = [added[number].output() for number in range(len(PROMPTS))]
    return [[(o.token_ids, o.finish_reason, o.text) for o in out.outputs] for out in outputs]


@pytest.mark.parametrize("arrivals", [[0, 0, 0, 0, 0], [0, 1, 3, 4, 9]])
@pytest.mark.parametrize(
    "options", [{}, {"num_pages": 13}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}]
)
def test_answers_are_the_same(
    checkpoint: Folder, arrivals: list[int], options: dict[str, Any]
) -> None:
    behind = make_llm(checkpoint(), **options)
    expected = answers(behind, PARAMS, arrivals)
    llm = make_llm(checkpoint(), **options)
    runner = ahead(llm)
    assert answers(llm, PARAMS, arrivals) == expected
    assert runner.unseen > 5
    assert llm.engine.counters.output_tokens == behind.engine.counters.output_tokens
    if "num_pages" in options and arrivals == [0] * 5:
        assert llm.engine.counters.preemptions > 0


def test_an_end_that_nobody_foresaw_is_an_end(checkpoint: Folder) -> None:
    expected = answers(make_llm(checkpoint()), PARAMS, [0] * 5)
    stops = [
        dataclasses.replace(params, stop_token_ids=[outputs[0][0][len(outputs[0][0]) // 2]])
        for params, outputs in zip(PARAMS, expected, strict=True)
    ]
    behind = answers(make_llm(checkpoint()), stops, [0] * 5)
    llm = make_llm(checkpoint())
    ahead(llm)
    assert answers(llm, stops, [0] * 5) == behind
    assert behind != expected


def test_a_request_that_is_aborted_while_a_step_is_ahead_leaves_the_others_alone(
    checkpoint: Folder,
) -> None:
    expected = answers(make_llm(checkpoint()), PARAMS, [0] * 5)
    llm = make_llm(checkpoint())
    ahead(llm)
    engine = llm.engine
    added = [
        engine.add(Request(f"r{n}", engine.prompts.from_parts(prompt), one))
        for n, (prompt, one) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    for _ in range(4):
        engine.step()
    engine.abort("r1")
    engine.check()
    while engine.has_work:
        engine.step()
        engine.check()
    assert_idle(llm)
    for number in (0, 2, 3, 4):
        tokens = [output.token_ids for output in added[number].output().outputs]
        assert tokens == [output[0] for output in expected[number]]


def test_a_last_token_that_is_foreseen_costs_no_step_more(checkpoint: Folder) -> None:
    behind, llm = make_llm(checkpoint()), make_llm(checkpoint())
    ahead(llm)
    for each in (behind, llm):
        each.generate(PROMPTS[:2], dataclasses.replace(GREEDY, max_tokens=5))
    assert llm.engine.counters.steps == behind.engine.counters.steps
