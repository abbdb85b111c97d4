"""A pool of processes that answer items, each with arms of its own.

A small model leaves most of a machine idle: one process uses one core, or a GPU that waits for
launches. Jobs are groups of items. A free process gets another job of the same items if there is
one, because their prompts are in its cache."""

import multiprocessing
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch

from looseleaf.errors import LooseleafError
from looseleaf_lab.errors import EvaluationFailed
from looseleaf_lab.evals.task import Answer, Arm, Item

MakeArms = Callable[[], Sequence[Arm]]
"""Called once per process; must be picklable, e.g. a `functools.partial` of a function."""


@dataclass(frozen=True)
class Job:
    """Items for the arm of this number; jobs of one ``batch`` have the same items."""

    batch: int
    arm: int
    items: tuple[Item, ...]


class WorkerPool:
    """``number`` processes that share the CPU's threads; a context manager."""

    def __init__(self, number: int, make_arms: MakeArms) -> None:
        self._number = number
        self._make_arms = make_arms
        self._members: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> "WorkerPool":
        # a forked process would inherit threads that do not run
        context = multiprocessing.get_context("spawn")
        threads = max(1, torch.get_num_threads() // self._number)
        for _ in range(self._number):
            connection, worker_end = context.Pipe()
            process = context.Process(
                target=_work, args=(worker_end, self._make_arms, threads), daemon=True
            )
            process.start()
            worker_end.close()
            self._members[connection] = process
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection, process in self._members.items():
            connection.close()
            if kind is not None:
                process.terminate()
            process.join()

    def answer(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Sequence[Answer]]]:
        """Every job with its answers, in order of completion.

        Raises an arm's own LooseleafError, and EvaluationFailed if a process ends."""
        queues: dict[int, deque[Job]] = defaultdict(deque)
        for job in jobs:
            queues[job.batch].append(job)
        running: dict[Connection, Job] = {}

        def submit(connection: Connection, batch: int | None) -> None:
            queue = queues.get(batch) if batch is not None else None
            if queue_to_serve := queue or max(queues.values(), key=len, default=deque[Job]()):
                running[connection] = queue_to_serve.popleft()
                connection.send(running[connection])

        for connection in self._members:
            submit(connection, None)
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                answers, job = self._receive(ready), running.pop(ready)
                submit(ready, job.batch)
                yield job, answers

    def _receive(self, connection: Connection) -> Sequence[Answer]:
        try:
            answers: Sequence[Answer] | LooseleafError = connection.recv()
        except (EOFError, ConnectionError) as error:
            raise EvaluationFailed(
                "a process of the evaluation ended (its own message is above), maybe for lack of "
                "memory: use fewer --processes"
            ) from error
        if isinstance(answers, LooseleafError):
            raise answers
        return answers


def _work(worker_end: Any, make_arms: MakeArms, threads: int) -> None:
    torch.set_num_threads(threads)
    arms: Sequence[Arm] = ()
    while True:
        try:
            job = worker_end.recv()
        except EOFError:
            return
        try:
            arms = arms or make_arms()
            worker_end.send(arms[job.arm].answer(job.items))
        except LooseleafError as error:
            worker_end.send(error)
