"""Several processes that answer items at the same time, each with arms of its own.

A small model leaves most of a machine idle: one process keeps one core busy, or a GPU waiting for
its next launch. Items are dealt out in lots. Who is done with one gets another of the same items as
long as there are any, since their prompts are in its cache."""

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
"""Called once in every process; must be picklable, e.g. a `functools.partial` of a function."""


@dataclass(frozen=True)
class Lot:
    """Items for the arm of this number; lots of one ``batch`` have the same items."""

    batch: int
    arm: int
    items: tuple[Item, ...]


class Crew:
    """``number`` processes, which share the processor's threads. To be used in a ``with``."""

    def __init__(self, number: int, make_arms: MakeArms) -> None:
        self._number = number
        self._make_arms = make_arms
        self._members: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> "Crew":
        # a forked process would inherit threads that do not run
        context = multiprocessing.get_context("spawn")
        threads = max(1, torch.get_num_threads() // self._number)
        for _ in range(self._number):
            ours, theirs = context.Pipe()
            member = context.Process(
                target=_work, args=(theirs, self._make_arms, threads), daemon=True
            )
            member.start()
            theirs.close()
            self._members[ours] = member
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for ours, member in self._members.items():
            ours.close()
            if kind is not None:
                member.terminate()
            member.join()

    def answer(self, lots: Sequence[Lot]) -> Iterator[tuple[Lot, Sequence[Answer]]]:
        """Every lot with its answers, as they come.

        Raises what an arm raised, EvaluationFailed if a process ended by itself."""
        left: dict[int, deque[Lot]] = defaultdict(deque)
        for lot in lots:
            left[lot.batch].append(lot)
        given: dict[Connection, Lot] = {}

        def give(ours: Connection, batch: int | None) -> None:
            own = left.get(batch) if batch is not None else None
            if lots_left := own or max(left.values(), key=len, default=deque[Lot]()):
                given[ours] = lots_left.popleft()
                ours.send(given[ours])

        for ours in self._members:
            give(ours, None)
        while given:
            for ready in wait(list(given)):
                assert isinstance(ready, Connection)
                answers, lot = self._receive(ready), given.pop(ready)
                give(ready, lot.batch)
                yield lot, answers

    def _receive(self, ours: Connection) -> Sequence[Answer]:
        try:
            answers: Sequence[Answer] | LooseleafError = ours.recv()
        except (EOFError, ConnectionError) as error:
            raise EvaluationFailed(
                "a process of the evaluation ended by itself (its own message is above): is there "
                "memory for so many? Ask for fewer --processes"
            ) from error
        if isinstance(answers, LooseleafError):
            raise answers
        return answers


def _work(theirs: Any, make_arms: MakeArms, threads: int) -> None:
    torch.set_num_threads(threads)
    arms: Sequence[Arm] = ()
    while True:
        try:
            lot = theirs.recv()
        except EOFError:
            return
        try:
            arms = arms or make_arms()
            theirs.send(arms[lot.arm].answer(lot.items))
        except LooseleafError as error:
            theirs.send(error)
