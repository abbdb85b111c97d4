"""A task and an arm that need no model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from looseleaf_lab.evals.task import Answer, Item


@dataclass(frozen=True)
class Sums:
    """Asks for the sum of a seed and one."""

    name: str = "sums"
    setting: str = "one digit"

    def items(self, seeds: range) -> Sequence[Item]:
        return [Item(str(s), (f"{s}",), "plus one?", (str(s + 1),)) for s in seeds]

    def score(self, item: Item, text: str) -> dict[str, float]:
        return {"exact": float(text == item.answers[0]), "length": len(text) / 10}


@dataclass
class Knower:
    """Right but for the seeds in ``wrong``; remembers what it was asked."""

    wrong: tuple[int, ...] = ()
    name: str = "knower"
    asked: list[str] = field(default_factory=list)
    fails_after: int | None = None

    def answer(self, items: Sequence[Item]) -> Sequence[Answer]:
        if self.fails_after is not None and len(self.asked) >= self.fails_after:
            raise KeyboardInterrupt
        self.asked += [item.key for item in items]
        return [
            Answer("?" if int(item.key) in self.wrong else item.answers[0], {"effort": 0.5})
            for item in items
        ]
