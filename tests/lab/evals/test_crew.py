"""Answers by several processes are those of one, and a process that fails says so."""

import os
from functools import partial
from pathlib import Path

import pytest

from looseleaf.errors import InvalidRequest
from looseleaf_lab.errors import EvaluationFailed
from looseleaf_lab.evals.crew import Job, WorkerPool
from looseleaf_lab.evals.run import AnswerFile, Runner, Source
from looseleaf_lab.evals.task import Answer, Item
from tests.lab.evals.conftest import Knower, Sums

SEEDS = range(7)
SOURCE = Source("abc", "m")


class Teller(Knower):
    """Says which process answered."""

    def answer(self, items):  # type: ignore[no-untyped-def]
        return [Answer(a.text, {"process": os.getpid()}) for a in super().answer(items)]


class Refuser(Knower):
    def answer(self, items):  # type: ignore[no-untyped-def]
        raise InvalidRequest("not this one")


class Quitter(Knower):
    def answer(self, items):  # type: ignore[no-untyped-def]
        os._exit(3)


def made(kind: type[Knower]) -> list[Knower]:
    return [kind(name="one"), kind(wrong=(2,), name="two")]


def test_several_processes_answer_as_one_does_and_every_item_once(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    arms = made(Teller)
    runner = Runner(SOURCE, AnswerFile(path), batch=2)
    heard: list[int] = []
    with WorkerPool(2, partial(made, Teller)) as pool:
        runner.run_ahead(Sums(), arms, SEEDS, pool, heard.append)
    assert heard[-1] == len(SEEDS) * len(arms) == len(path.read_text().splitlines())
    scored = [runner.run(Sums(), arm, SEEDS) for arm in arms]
    assert [len(arm.asked) for arm in arms] == [0, 0]
    assert [sum(one.metrics["exact"] for one in some) for some in scored] == [7, 6]
    processes = {one.answer.report["process"] for some in scored for one in some}
    assert len(processes) == 2 and os.getpid() not in processes


def test_what_was_answered_before_is_not_asked_of_a_pool() -> None:
    runner = Runner(SOURCE, AnswerFile(), batch=2)
    arms = made(Knower)
    runner.run(Sums(), arms[0], range(3))
    runner.run(Sums(), arms[1], SEEDS)
    jobs: list[Job] = []

    class Listener(WorkerPool):
        def answer(self, jobs_given):  # type: ignore[no-untyped-def]
            jobs.extend(jobs_given)
            return iter(())

    runner.run_ahead(Sums(), arms, SEEDS, Listener(2, partial(made, Knower)))
    assert [(job.batch, job.arm, [i.key for i in job.items]) for job in jobs] == [
        (2, 0, ["3"]), (4, 0, ["4", "5"]), (6, 0, ["6"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        (Refuser, InvalidRequest, "not this one"),
        (Quitter, EvaluationFailed, "fewer --processes"),
    ],
)
def test_a_process_that_fails_ends_the_run_with_a_reason(
    kind: type[Knower], error: type[Exception], says: str
) -> None:
    (item,) = Sums().items(range(1))
    job = Job(0, 0, (item,))
    with pytest.raises(error, match=says), WorkerPool(1, partial(made, kind)) as pool:
        list(pool.answer([job]))


def test_who_is_done_goes_on_with_the_items_whose_prompts_it_has() -> None:
    items = tuple(Item(str(n), (), "?", (str(n),)) for n in range(2))
    jobs = [Job(n, arm, (items[n],)) for arm in (0, 1) for n in range(2)]
    with WorkerPool(1, partial(made, Teller)) as pool:
        order = [(job.batch, job.arm) for job, _ in pool.answer(jobs)]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1)]
