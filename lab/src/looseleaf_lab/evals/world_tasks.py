"""The generated world's tasks as `Task`s: one held-out world an item."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from looseleaf_lab.evals.task import Item
from looseleaf_lab.evals.world import (
    MAX_HOPS,
    CountTokens,
    Example,
    count_words,
    is_correct,
    lines_right,
    make_deep_chain,
    make_example,
    make_look_alike,
    make_lookups,
    make_needle,
    make_needles,
    make_roll_call,
    numbered_lines,
)

# tokens of an output for each line asked for: the longest answers take 26 of the reference model
_TOKENS_PER_LINE = 32


class _WholeAnswers:
    """What tasks of one question share: how its answer is scored."""

    def score(self, item: Item, text: str) -> dict[str, float]:
        """The whole answer, word for word, but for the spacing."""
        return {"exact": float(is_correct(item.answers[0], text))}


@dataclass(frozen=True)
class WorldTask(_WholeAnswers):
    """*lookup*, *look-alike*, *bridge*, *chain* of ``hops`` or *unanswerable*."""

    name: str
    hops: int | None = None
    documents: int = 6

    @property
    def setting(self) -> str:
        hops = f"{self.hops} hop{'s' if self.hops > 1 else ''}, " if self.hops else ""
        return f"{hops}{self.documents} documents"

    def items(self, seeds: range) -> Sequence[Item]:
        return [_item(self._example(seed), seed) for seed in seeds]

    def _example(self, seed: int) -> Example:
        if self.name == "look-alike":
            return make_look_alike(seed, self.documents)
        if self.hops is not None and self.hops > MAX_HOPS:
            return make_deep_chain(seed, self.hops, self.documents)
        return make_example(self.name, seed, num_documents=self.documents, hops=self.hops)


@dataclass(frozen=True)
class LookupsTask(_WholeAnswers):
    """*lookup* of several facts of the same world, one at a time: ``per_world`` seeds in a row
    share its documents, so that a long context is read, or hosted, once for all of them."""

    documents: int = 6
    per_world: int = 8
    name: str = "lookup"

    @property
    def setting(self) -> str:
        return f"{self.documents} documents, {self.per_world} questions each"

    def items(self, seeds: range) -> Sequence[Item]:
        items = []
        for number, own in groupby(seeds, lambda seed: seed // self.per_world):
            made = make_lookups(number, self.per_world, self.documents)
            items += [_item(made[seed % self.per_world], seed) for seed in own]
        return items


@dataclass(frozen=True)
class NeedleTask(_WholeAnswers):
    """One fact in a context of about ``tokens`` by ``count``, at every depth in turn; or several
    ``needles`` in each context, one asked for at a time."""

    tokens: int
    count: CountTokens = count_words
    needles: int = 1
    name: str = "needle"

    @property
    def setting(self) -> str:
        several = f", {self.needles} needles" if self.needles > 1 else ""
        return f"{self.tokens} tokens{several}"

    def items(self, seeds: range) -> Sequence[Item]:
        """One needle a seed; its depth is the seed's last digit in base 11. Of several needles so
        many seeds in a row share a context."""
        if self.needles == 1:
            return [_item(make_needle(seed, self.tokens, count=self.count), seed) for seed in seeds]
        items = []
        for context, own in groupby(seeds, lambda seed: seed // self.needles):
            made = make_needles(context, self.tokens, self.needles, self.count)
            items += [_item(made[seed % self.needles], seed) for seed in own]
        return items


@dataclass(frozen=True)
class RollCallTask:
    """``lines`` questions about one world, all answered in one output."""

    lines: int = 40
    documents: int = 50
    name: str = "roll-call"

    @property
    def setting(self) -> str:
        return f"{self.lines} lines, {self.documents} documents"

    def items(self, seeds: range) -> Sequence[Item]:
        made = [make_roll_call(seed, self.lines, self.documents) for seed in seeds]
        length = self.lines * _TOKENS_PER_LINE
        return [
            Item(str(seed), one.documents, one.question, one.lines, length)
            for seed, one in zip(seeds, made, strict=True)
        ]

    def score(self, item: Item, text: str) -> dict[str, float]:
        """The share of lines that are right; of lines that are there at all; and of the first and
        the last third that are right."""
        right = lines_right(item.answers, text)
        given = set(numbered_lines(text)) & set(range(1, len(right) + 1))
        third = max(1, len(right) // 3)
        return {
            "lines": sum(right) / len(right),
            "lines_given": len(given) / len(right),
            "lines_first_third": sum(right[:third]) / third,
            "lines_last_third": sum(right[-third:]) / third,
        }


def _item(example: Example, seed: int) -> Item:
    return Item(str(seed), example.documents, example.question, (example.answer,))
