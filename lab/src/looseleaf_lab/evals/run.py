"""Runs a task's items through an arm, in batches, and stores every answer, so a run can resume.

The file of answers has one JSON object per line. An answer is reused only for the same code, model,
arm and item, so a changed prompt or commit computes it again."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from looseleaf.errors import InvalidOption
from looseleaf_lab.evals.crew import Job, WorkerPool
from looseleaf_lab.evals.task import Answer, Arm, Item, Task


@dataclass(frozen=True)
class Source:
    """The origin of answers: ``code`` is the commit, ``model`` a name, and ``weights`` separates
    checkpoints of the same name."""

    code: str
    model: str
    weights: str = ""


@dataclass(frozen=True)
class ScoredItem:
    """An item with its answer and metrics."""

    item: Item
    answer: Answer
    metrics: Mapping[str, float]


_LINE_START = '{"of": ['
"""The first characters of an answer's line."""


class AnswerFile:
    """Answers in an append-only file; without a path, in memory.

    Drops a last line that an interrupt cut off. Raises InvalidOption for a file of other content,
    which it leaves unchanged, or one that can't be written."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._known: dict[tuple[str, ...], Answer] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+", newline="", encoding="utf-8") as file:
                file.seek(0)
                content = file.read()
                *lines, partial_line = content.split("\n")
                self._read(lines)
                if not (
                    partial_line.startswith(_LINE_START) or _LINE_START.startswith(partial_line)
                ):
                    raise _bad_line(len(lines) + 1, path)
                if partial_line:
                    file.truncate(len(content[: content.rfind("\n") + 1].encode()))
        except OSError as error:
            raise InvalidOption(
                f"answers can't be stored in {path} ({error.strerror}): choose another file with "
                "--answers"
            ) from error
        except UnicodeDecodeError as error:
            raise InvalidOption(
                f"{path} is no file of answers: choose another file with --answers"
            ) from error

    def _read(self, lines: Sequence[str]) -> None:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                name = tuple(str(part) for part in entry["of"])
                self._known[name] = Answer(entry["text"], entry["report"])
            except (ValueError, KeyError, TypeError) as error:
                raise _bad_line(number, self.path) from error

    def __len__(self) -> int:
        return len(self._known)

    def find(self, name: tuple[str, ...]) -> Answer | None:
        """The stored answer of this name, or None."""
        return self._known.get(name)

    def keep(self, names: Sequence[tuple[str, ...]], answers: Sequence[Answer]) -> None:
        """Append answers to the file."""
        self._known.update(zip(names, answers, strict=True))
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for name, answer in zip(names, answers, strict=True):
                file.write(json.dumps({"of": name, **asdict(answer)}, ensure_ascii=False) + "\n")


def _bad_line(number: int, path: Path | None) -> InvalidOption:
    return InvalidOption(
        f"line {number} of {path} is no answer: choose another file with --answers"
    )


@dataclass(frozen=True)
class Runner:
    """Runs tasks on one source of answers, ``batch`` items at a time."""

    source: Source
    answers: AnswerFile | None = None
    batch: int = 16

    def run(
        self, task: Task, arm: Arm, seeds: range, on_answer: Callable[[int], None] | None = None
    ) -> list[ScoredItem]:
        """Every item of ``seeds``, answered by ``arm`` and scored; stored answers are reused.

        ``on_answer`` gets the number of answers so far."""
        items = self._items(task, seeds)
        answers = {}
        for number, item in enumerate(items):
            stored = self.answers.find(self._name(task, arm, item)) if self.answers else None
            if stored is not None:
                answers[number] = stored
        missing = [number for number in range(len(items)) if number not in answers]
        if on_answer is not None:
            on_answer(len(answers))
        for start in range(0, len(missing), self.batch):
            numbers = missing[start : start + self.batch]
            new_answers = arm.answer([items[number] for number in numbers])
            answers.update(zip(numbers, new_answers, strict=True))
            if self.answers is not None:
                names = [self._name(task, arm, items[number]) for number in numbers]
                self.answers.keep(names, new_answers)
            if on_answer is not None:
                on_answer(len(answers))
        return [
            ScoredItem(item, answers[number], task.score(item, answers[number].text))
            for number, item in enumerate(items)
        ]

    def run_ahead(
        self,
        task: Task,
        arms: Sequence[Arm],
        seeds: range,
        pool: WorkerPool,
        on_answer: Callable[[int], None] | None = None,
    ) -> None:
        """Answer every item under every arm in the pool's processes, and store the answers.

        A following `run` reuses them, so ``answers`` is required. ``on_answer`` gets the number of
        answers so far, out of items times arms."""
        assert self.answers is not None, "run_ahead needs a store of answers"
        items = self._items(task, seeds)
        jobs, count, find = [], 0, self.answers.find
        for start in range(0, len(items), self.batch):
            batch = items[start : start + self.batch]
            for number, arm in enumerate(arms):
                missing = tuple(i for i in batch if find(self._name(task, arm, i)) is None)
                count += len(batch) - len(missing)
                if missing:
                    jobs.append(Job(start, number, missing))
        for job, answers in pool.answer(jobs):
            self.answers.keep([self._name(task, arms[job.arm], i) for i in job.items], answers)
            count += len(job.items)
            if on_answer is not None:
                on_answer(count)

    def _items(self, task: Task, seeds: range) -> Sequence[Item]:
        try:
            return task.items(seeds)
        except ValueError as error:
            raise InvalidOption(f"{task.name}, {task.setting}: {error}") from error

    def _name(self, task: Task, arm: Arm, item: Item) -> tuple[str, ...]:
        source = self.source
        prompt = item.fingerprint()
        return (source.code, source.model, source.weights, task.name, arm.name, item.key, prompt)
