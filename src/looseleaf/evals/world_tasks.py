"""The generated world's tasks as `Task`s: one question about one held-out world an item."""

from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf.evals.task import Item
from looseleaf.evals.world import Example, is_correct, make_example


@dataclass(frozen=True)
class WorldTask:
    """*lookup*, *bridge*, *chain* of ``hops`` or *unanswerable* over ``documents``."""

    name: str
    hops: int | None = None
    documents: int = 6

    @property
    def setting(self) -> str:
        """Hops and documents."""
        hops = f"{self.hops} hop{'s' if self.hops > 1 else ''}, " if self.hops else ""
        return f"{hops}{self.documents} documents"

    def items(self, seeds: range) -> Sequence[Item]:
        """One question a world."""
        return [_item(self._example(seed), seed) for seed in seeds]

    def score(self, item: Item, text: str) -> dict[str, float]:
        """The whole answer, word for word, but for the spacing."""
        example = Example(item.documents, item.question, item.answers[0], self.name, 0)
        return {"exact": float(is_correct(example, text))}

    def _example(self, seed: int) -> Example:
        return make_example(self.name, seed, num_documents=self.documents, hops=self.hops)


def _item(example: Example, seed: int) -> Item:
    return Item(str(seed), example.documents, example.question, (example.answer,))
