"""Runs arms over the questions of a file: each measured once, stored at once, then summarized.

Even-numbered questions are for development and odd-numbered ones decide, counted from 0."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from looseleaf.llm.llm import LLM
from looseleaf_lab.evals.arms import Form
from looseleaf_lab.evals.distance.arms import FULL, REUSE, DistanceArm
from looseleaf_lab.evals.distance.measure import DistanceMeter, Reference, candidates_of
from looseleaf_lab.evals.distance.summary import (
    DistanceRow,
    Figures,
    law_of,
    summarize,
    verdict_of,
)
from looseleaf_lab.evals.files import FileTask
from looseleaf_lab.evals.run import AnswerFile
from looseleaf_lab.evals.task import Item

Measured = Mapping[str, list[Figures]]
"""The figures of every question, by arm."""


@dataclass(frozen=True)
class DistanceRun:
    """Distances over one model. ``source`` identifies code and model in the file of answers.

    A choice is among ``num_candidates`` answers; there is none with 1."""

    llm: LLM
    form: Form
    max_tokens: int
    answers: AnswerFile
    source: tuple[str, ...]
    num_candidates: int = 4
    primer: tuple[str, ...] = ()

    def count(self, task: FileTask, arms: Sequence[DistanceArm], part: str) -> int:
        """Measurements of a file."""
        return len(_numbers(task, part)) * len(arms)

    def measure(
        self,
        task: FileTask,
        arms: Sequence[DistanceArm],
        part: str,
        on_count: Callable[[int], None] = lambda count: None,
    ) -> Measured:
        """The figures of every question of ``part`` under every arm.

        ``on_count`` gets the number of measurements so far. Raises the errors of the engine."""
        meter = DistanceMeter(self.llm, self.form, self.max_tokens, self.primer)
        is_warm = False
        measured: dict[str, list[Figures]] = {arm.name: [] for arm in arms}
        for number in _numbers(task, part):
            item, reference = task.entries[number], None
            candidates = candidates_of(task.entries, number, self.num_candidates)
            names = {arm: self._name(task, arm, item) for arm in arms}
            missing = [arm for arm in arms if self.answers.find(names[arm]) is None]
            if missing and not is_warm:
                # the first passes of a process are slower, and first tokens are timed
                for arm in (FULL, REUSE):
                    _, reference = meter.measure(item, candidates, arm, reference)
                reference, is_warm = None, True
            if missing and FULL not in missing:
                _, reference = meter.measure(item, candidates, FULL, None)
            for arm in missing:
                reference = self._measure(meter, item, candidates, arm, reference, names[arm])
            for arm in arms:
                answer = self.answers.find(names[arm])
                assert answer is not None, "every arm is measured"
                measured[arm.name].append(answer.report)
            on_count(sum(map(len, measured.values())))
        return measured

    def _measure(
        self,
        meter: DistanceMeter,
        item: Item,
        candidates: Sequence[str],
        arm: DistanceArm,
        reference: Reference | None,
        name: tuple[str, ...],
    ) -> Reference:
        answer, reference = meter.measure(item, candidates, arm, reference)
        self.answers.keep([name], [answer])
        return reference

    def rows(
        self, model: str, task: FileTask, arms: Sequence[DistanceArm], part: str, measured: Measured
    ) -> list[tuple[DistanceRow, Sequence[Figures]]]:
        """A row per arm with its figures, empty without questions."""
        if not measured[FULL.name]:
            return []
        device = str(self.llm.engine.runner.model.device)
        labels = {"model": model, "file": task.label, "part": part, "device": device}
        full, reuse = measured[FULL.name], measured[REUSE.name]
        return [
            (summarize(labels, arm.name, measured[arm.name], full, reuse), measured[arm.name])
            for arm in arms
        ]

    def finding(self, row: DistanceRow, figures: Sequence[Figures]) -> str:
        """The law or the verdict of a row."""
        exact = row.arm in (FULL.name, "prefix", "all")
        return law_of(row, figures) if exact else verdict_of(row)

    def _name(self, task: FileTask, arm: DistanceArm, item: Item) -> tuple[str, ...]:
        prompt = item.fingerprint()
        settings = f"{self.form} {self.num_candidates} {self.max_tokens}"
        if arm.primed:
            settings += f" {blake2b(repr(self.primer).encode(), digest_size=8).hexdigest()}"
        return (*self.source, settings, task.label, arm.name, item.key, prompt)


def _numbers(task: FileTask, part: str) -> list[int]:
    """The numbers of a part's questions: ``develop`` even, ``decide`` odd, or ``all``."""
    numbers = range(len(task.entries))
    return [n for n in numbers if part == "all" or n % 2 == (part == "decide")]
