"""The generated world's tasks as `Task`s; each item has a held-out world."""

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

# output tokens per line: the longest answers have 26 tokens of the reference model
_TOKENS_PER_LINE = 32


class _WholeAnswers:
    """Scoring of tasks with one question per item."""

    def score(self, item: Item, text: str) -> dict[str, float]:
        """Exact match of the whole answer, except for white space."""
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
    """*lookup* of several facts in one world, one question per item.

    ``per_world`` adjacent seeds share its documents, so that a long context is computed or hosted
    once."""

    documents: int = 6
    per_world: int = 8
    name: str = "lookup"

    @property
    def setting(self) -> str:
        return f"{self.documents} documents, {self.per_world} questions each"

    def items(self, seeds: range) -> Sequence[Item]:
        items = []
        for number, seeds_of_world in groupby(seeds, lambda seed: seed // self.per_world):
            examples = make_lookups(number, self.per_world, self.documents)
            items += [_item(examples[seed % self.per_world], seed) for seed in seeds_of_world]
        return items


@dataclass(frozen=True)
class NeedleTask(_WholeAnswers):
    """One fact in a context of about ``tokens`` (by ``count``), at a depth that the seed gives; or
    several ``needles`` per context, one question per item."""

    tokens: int
    count: CountTokens = count_words
    needles: int = 1
    name: str = "needle"

    @property
    def setting(self) -> str:
        suffix = f", {self.needles} needles" if self.needles > 1 else ""
        return f"{self.tokens} tokens{suffix}"

    def items(self, seeds: range) -> Sequence[Item]:
        """One needle per seed; the seed modulo 11 is its depth in tenths. With several needles,
        ``needles`` adjacent seeds share a context."""
        if self.needles == 1:
            return [_item(make_needle(seed, self.tokens, count=self.count), seed) for seed in seeds]
        items = []
        for context, seeds_of_context in groupby(seeds, lambda seed: seed // self.needles):
            examples = make_needles(context, self.tokens, self.needles, self.count)
            items += [_item(examples[seed % self.needles], seed) for seed in seeds_of_context]
        return items


@dataclass(frozen=True)
class RollCallTask:
    """``lines`` questions about one world, with one output for all answers."""

    lines: int = 40
    documents: int = 50
    name: str = "roll-call"

    @property
    def setting(self) -> str:
        return f"{self.lines} lines, {self.documents} documents"

    def items(self, seeds: range) -> Sequence[Item]:
        roll_calls = [make_roll_call(seed, self.lines, self.documents) for seed in seeds]
        length = self.lines * _TOKENS_PER_LINE
        return [
            Item(str(seed), roll_call.documents, roll_call.question, roll_call.lines, length)
            for seed, roll_call in zip(seeds, roll_calls, strict=True)
        ]

    def score(self, item: Item, text: str) -> dict[str, float]:
        """Shares of lines: right, present, and right within the first and the last third."""
        is_right = lines_right(item.answers, text)
        numbers = set(numbered_lines(text)) & set(range(1, len(is_right) + 1))
        third = max(1, len(is_right) // 3)
        return {
            "lines": sum(is_right) / len(is_right),
            "lines_given": len(numbers) / len(is_right),
            "lines_first_third": sum(is_right[:third]) / third,
            "lines_last_third": sum(is_right[-third:]) / third,
        }


def _item(example: Example, seed: int) -> Item:
    return Item(str(seed), example.documents, example.question, (example.answer,))
