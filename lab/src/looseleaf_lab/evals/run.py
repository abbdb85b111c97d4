"""Asks a task's items of an arm, in batches, and keeps every answer so that a run can go on.

The file of answers has one JSON object a line. An answer is taken up again only if the code, the
model, the arm and the item are the same, so a changed prompt or another commit asks anew."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from looseleaf.errors import InvalidOption
from looseleaf_lab.evals.crew import Crew, Lot
from looseleaf_lab.evals.task import Answer, Arm, Item, Task


@dataclass(frozen=True)
class Source:
    """What answers come from: ``code`` is the commit, ``model`` a name, ``weights`` tell two
    checkpoints of one name apart."""

    code: str
    model: str
    weights: str = ""


@dataclass(frozen=True)
class Scored:
    """An item with its answer and metrics."""

    item: Item
    answer: Answer
    metrics: Mapping[str, float]


_BEGINS = '{"of": ['
"""How the line of an answer begins."""


class AnswerFile:
    """Answers given so far, in a file that only grows. Raises InvalidOption if it is not one, or
    can't be written to; what is no file of answers is left as it is.

    A last line that was cut off by an interrupt is dropped. Without a path they are kept for this
    run only."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._known: dict[tuple[str, ...], Answer] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+", newline="", encoding="utf-8") as file:
                file.seek(0)
                whole = file.read()
                *lines, cut = whole.split("\n")
                self._read(lines)
                if not (cut.startswith(_BEGINS) or _BEGINS.startswith(cut)):
                    raise _no_answer(len(lines) + 1, path)
                if cut:
                    file.truncate(len(whole[: whole.rfind("\n") + 1].encode()))
        except OSError as error:
            raise InvalidOption(
                f"answers can't be kept in {path} ({error.strerror}): choose another file with "
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
                raise _no_answer(number, self.path) from error

    def __len__(self) -> int:
        return len(self._known)

    def find(self, name: tuple[str, ...]) -> Answer | None:
        """The answer kept under this name, if there is one."""
        return self._known.get(name)

    def keep(self, names: Sequence[tuple[str, ...]], answers: Sequence[Answer]) -> None:
        """Append answers."""
        self._known.update(zip(names, answers, strict=True))
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for name, answer in zip(names, answers, strict=True):
                file.write(json.dumps({"of": name, **asdict(answer)}, ensure_ascii=False) + "\n")


def _no_answer(number: int, path: Path | None) -> InvalidOption:
    return InvalidOption(
        f"line {number} of {path} is no answer: choose another file with --answers"
    )


@dataclass(frozen=True)
class Runner:
    """Runs tasks against one source of answers, ``batch`` items at a time."""

    source: Source
    answers: AnswerFile | None = None
    batch: int = 16

    def run(
        self, task: Task, arm: Arm, seeds: range, on_answer: Callable[[int], None] | None = None
    ) -> list[Scored]:
        """Every item of ``seeds`` answered by ``arm`` and scored; ``on_answer`` hears how many
        are done. Items that were answered before are not asked again."""
        items = self._items(task, seeds)
        done = {}
        for number, item in enumerate(items):
            known = self.answers.find(self._name(task, arm, item)) if self.answers else None
            if known is not None:
                done[number] = known
        left = [number for number in range(len(items)) if number not in done]
        if on_answer is not None:
            on_answer(len(done))
        for start in range(0, len(left), self.batch):
            numbers = left[start : start + self.batch]
            given = arm.answer([items[number] for number in numbers])
            done.update(zip(numbers, given, strict=True))
            if self.answers is not None:
                names = [self._name(task, arm, items[number]) for number in numbers]
                self.answers.keep(names, given)
            if on_answer is not None:
                on_answer(len(done))
        return [
            Scored(item, done[number], task.score(item, done[number].text))
            for number, item in enumerate(items)
        ]

    def run_ahead(
        self,
        asked: tuple[Task, Sequence[Arm]],
        seeds: range,
        crew: Crew,
        on_answer: Callable[[int], None] | None = None,
    ) -> None:
        """Have several processes answer every item under every arm, so that `run` finds them all.

        Needs ``answers``. ``on_answer`` hears how many answers are there, of as many as items
        times arms."""
        task, arms = asked
        assert self.answers is not None, "answers that are not kept would be lost"
        items = self._items(task, seeds)
        lots, done = [], 0
        for start in range(0, len(items), self.batch):
            batch = items[start : start + self.batch]
            for number, arm in enumerate(arms):
                known = self.answers.find
                left = tuple(i for i in batch if known(self._name(task, arm, i)) is None)
                done += len(batch) - len(left)
                if left:
                    lots.append(Lot(start, number, left))
        for lot, answers in crew.answer(lots):
            self.answers.keep([self._name(task, arms[lot.arm], i) for i in lot.items], answers)
            done += len(lot.items)
            if on_answer is not None:
                on_answer(done)

    def _items(self, task: Task, seeds: range) -> Sequence[Item]:
        try:
            return task.items(seeds)
        except ValueError as error:
            raise InvalidOption(f"{task.name}, {task.setting}: {error}") from error

    def _name(self, task: Task, arm: Arm, item: Item) -> tuple[str, ...]:
        source = self.source
        prompt = item.fingerprint()
        return (source.code, source.model, source.weights, task.name, arm.name, item.key, prompt)
