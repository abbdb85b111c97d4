"""One task type at one length, as a `Task`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from looseleaf_lab.evals.ruler.kinds import (
    Build,
    Needles,
    Prompt,
    common_words,
    frequent_words,
    one_fact,
    two_facts,
    variables,
)
from looseleaf_lab.evals.task import Item
from looseleaf_lab.evals.world import CountTokens, count_words

KINDS: Mapping[str, tuple[Build, int]] = MappingProxyType(
    {
        "niah-single-1": (Needles("noise"), 128),
        "niah-single-2": (Needles("essay"), 128),
        "niah-single-3": (Needles("essay", uuid_values=True), 128),
        "niah-multikey-1": (Needles("essay", keys=3), 128),
        "niah-multikey-2": (Needles("needles"), 128),
        "niah-multikey-3": (Needles("needles", uuid_keys=True, uuid_values=True), 128),
        "niah-multivalue": (Needles("essay", values=4), 128),
        "niah-multiquery": (Needles("essay", num_queried=4), 128),
        "vt": (variables, 64),
        "cwe": (common_words, 120),
        "fwe": (frequent_words, 50),
        "qa-1": (one_fact, 32),
        "qa-2": (two_facts, 32),
    }
)
"""The prompt builder and the maximal answer tokens of each type."""


@dataclass(frozen=True)
class RulerTask:
    """Type ``kind`` of `KINDS` in a prompt of nearly, and at most, ``tokens`` by ``count``."""

    kind: str
    tokens: int
    count: CountTokens = count_words

    @property
    def name(self) -> str:
        return f"ruler {self.kind}"

    @property
    def setting(self) -> str:
        return f"{self.tokens} tokens"

    def items(self, seeds: range) -> Sequence[Item]:
        """One prompt per seed. Raises ValueError if the smallest one is too long."""
        build, max_tokens = KINDS[self.kind]
        items = []
        for seed in seeds:
            prompt = self._fit(build, seed)
            items.append(
                Item(
                    str(seed),
                    prompt.documents,
                    prompt.question,
                    prompt.answers,
                    max_tokens,
                    prompt.before,
                )
            )
        return items

    def score(self, item: Item, text: str) -> dict[str, float]:
        """The share of the expected strings in the answer, ignoring case."""
        answer_text = text.lower()
        return {
            "found": sum(answer.lower() in answer_text for answer in item.answers)
            / len(item.answers)
        }

    def _fit(self, build: Build, seed: int) -> Prompt:
        """The prompt with the most hay found within ``tokens``."""
        units = max(1, self.tokens // 12)
        best: tuple[int, Prompt] | None = None
        for _ in range(12):
            prompt = build(seed, units)
            length = self._length(prompt)
            if length <= self.tokens and (best is None or units > best[0]):
                best = units, prompt
            if 0.97 * self.tokens <= length <= self.tokens:
                return prompt
            next_units = max(1, int(units * 0.99 * self.tokens / length))
            if next_units == units:
                break
            units = next_units
        if best is None:
            raise ValueError(
                f"{self.kind} does not fit into {self.tokens} tokens: use a longer prompt"
            )
        return best[1]

    def _length(self, prompt: Prompt) -> int:
        return self.count("\n".join((prompt.before, *prompt.documents, prompt.question)))
