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
        "niah-multiquery": (Needles("essay", asked=4), 128),
        "vt": (variables, 64),
        "cwe": (common_words, 120),
        "fwe": (frequent_words, 50),
        "qa-1": (one_fact, 32),
        "qa-2": (two_facts, 32),
    }
)
"""How a type's prompt is built, and how many tokens its answer may take."""


@dataclass(frozen=True)
class RulerTask:
    """``kind`` of `KINDS` in a prompt of at most, and nearly, ``tokens`` by ``count``."""

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
        """One prompt a seed. Raises ValueError if the smallest is longer than asked for."""
        build, max_tokens = KINDS[self.kind]
        made = []
        for seed in seeds:
            prompt = self._fitted(build, seed)
            made.append(
                Item(
                    str(seed),
                    prompt.documents,
                    prompt.question,
                    prompt.answers,
                    max_tokens,
                    prompt.before,
                )
            )
        return made

    def score(self, item: Item, text: str) -> dict[str, float]:
        """The share of the wanted strings that the answer holds, whatever their case."""
        said = text.lower()
        return {"found": sum(one.lower() in said for one in item.answers) / len(item.answers)}

    def _fitted(self, build: Build, seed: int) -> Prompt:
        """The prompt with about as much hay as fits, never more."""
        units = max(1, self.tokens // 12)
        best: tuple[int, Prompt] | None = None
        for _ in range(12):
            prompt = build(seed, units)
            length = self._length(prompt)
            if length <= self.tokens and (best is None or units > best[0]):
                best = units, prompt
            if 0.97 * self.tokens <= length <= self.tokens:
                return prompt
            wanted = max(1, int(units * 0.99 * self.tokens / length))
            if wanted == units:
                break
            units = wanted
        if best is None:
            raise ValueError(f"{self.kind} does not fit {self.tokens} tokens: ask for more")
        return best[1]

    def _length(self, prompt: Prompt) -> int:
        return self.count("\n".join((prompt.before, *prompt.documents, prompt.question)))
