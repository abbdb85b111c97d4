"""Long outputs from short questions: one prompt with several items, and one output with all
answers.

As in LongGenBench (Liu et al., arXiv 2410.04199), questions and answers are numbered, and each line
is scored like a separate answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from looseleaf_lab.evals.task import Item, Task
from looseleaf_lab.evals.world import numbered_lines

INSTRUCTION = "Answer all of these questions, one after the other, each on a line with its number:"


@dataclass(frozen=True)
class Joined:
    """``count`` items of ``inner`` in one prompt, with all their documents, each once."""

    inner: Task
    count: int

    @property
    def name(self) -> str:
        return f"{self.inner.name}, joined"

    @property
    def setting(self) -> str:
        return f"{self.count} questions of {self.inner.setting}"

    def items(self, seeds: range) -> Sequence[Item]:
        """One prompt per seed, with the next ``count`` inner items; the last prompt of a file may
        have fewer."""
        groups = [(seed, self._parts(seed)) for seed in seeds]
        return [self._join(seed, parts) for seed, parts in groups if parts]

    def score(self, item: Item, text: str) -> dict[str, float]:
        """The mean of each metric over the lines; a missing line scores as an empty answer."""
        lines = numbered_lines(text)
        parts = self._parts(int(item.key))
        scores = [
            self.inner.score(part, lines.get(number, "")) for number, part in enumerate(parts, 1)
        ]
        return {
            name: sum(line_scores[name] for line_scores in scores) / len(scores)
            for name in scores[0]
        }

    def _parts(self, seed: int) -> Sequence[Item]:
        return self.inner.items(range(seed * self.count, (seed + 1) * self.count))

    def _join(self, seed: int, parts: Sequence[Item]) -> Item:
        documents = dict.fromkeys(text for part in parts for text in part.documents)
        numbered = [f"{number}. {part.question}" for number, part in enumerate(parts, 1)]
        first = replace(parts[0], key=str(seed), documents=tuple(documents))
        return replace(
            first,
            question="\n".join([INSTRUCTION, *numbered]),
            answers=tuple(part.answers[0] if part.answers else "" for part in parts),
            max_tokens=sum(part.max_tokens + 4 for part in parts),
        )
