"""Questions and summaries from files, in the two public shapes that users bring.

*CacheBlend*: a JSON list of ``{"question", "answers", "ctxs": [{"title", "text"}, ...]}``.
*LongBench*: JSON lines of ``{"input", "context", "answers"}``; ``context`` is one text, cut into
documents here: at its "Passage 1:" headings, or else after so many words at a paragraph's end."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looseleaf.errors import InvalidOption
from looseleaf.evals.scores import METRICS
from looseleaf.evals.task import Item

QUESTIONS = "Answer the question from the given passages, with a few words only."
SUMMARIES = "Summarize the given text."
_PASSAGE = re.compile(r"(?m)^(?=Passage \d+:)")


@dataclass(frozen=True)
class FileTask:
    """The entries of one file; a "seed" is an entry's number. The first of ``metrics`` is the one
    to look at. ``instruction`` stands in front of the documents."""

    path: Path
    entries: tuple[Item, ...]
    metrics: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file's name."""
        return f"file {self.path.stem}"

    @property
    def setting(self) -> str:
        """How many documents an entry has."""
        numbers = [len(entry.documents) for entry in self.entries]
        low, high = min(numbers), max(numbers)
        return f"{low} documents" if low == high else f"{low} to {high} documents"

    def items(self, seeds: range) -> Sequence[Item]:
        """The entries of these numbers, as many as there are."""
        return self.entries[seeds.start : seeds.stop]

    def score(self, item: Item, text: str) -> dict[str, float]:
        """Each metric against the best of the right answers."""
        return {name: METRICS[name](text.strip(), item.answers) for name in self.metrics}


@dataclass(frozen=True)
class Reading:
    """How a file is read. ``page_words`` is a document's length where a context has no passages."""

    metrics: tuple[str, ...] = ("f1", "exact", "contains")
    instruction: str | None = None
    max_tokens: int = 64
    page_words: int = 400


def read_task(path: Path, reading: Reading) -> FileTask:
    """The task of a file. Raises InvalidOption if it has neither of the two shapes."""
    unknown = [name for name in reading.metrics if name not in METRICS]
    if unknown or not reading.metrics:
        raise InvalidOption(f"unknown metric {unknown}: there are {', '.join(METRICS)}")
    summary = reading.metrics[0] == "rouge-l"
    instruction = reading.instruction
    if instruction is None:
        instruction = SUMMARIES if summary else QUESTIONS
    items = []
    for number, entry in enumerate(_entries(path)):
        try:
            documents, question, answers = _parts(entry, reading.page_words)
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidOption(
                f"entry {number} of {path} has neither question, answers and ctxs nor input, "
                "answers and context"
            ) from error
        asked = question or instruction
        made = Item(str(number), documents, asked, answers, reading.max_tokens, instruction)
        items.append(made)
    if not items:
        raise InvalidOption(f"{path} has no entries")
    return FileTask(path, tuple(items), reading.metrics)


def _entries(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{path} can't be read: {error}") from error
    try:
        if text.lstrip().startswith("["):
            whole: list[Any] = json.loads(text)
            return whole
        # only a line feed ends a line: JSON may hold other characters that splitlines takes for one
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise InvalidOption(f"{path} is no JSON: {error}") from error


def _parts(entry: Any, page_words: int) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Documents, question and right answers of an entry of either shape."""
    answers = entry["answers"]
    right = (answers,) if isinstance(answers, str) else tuple(str(one) for one in answers)
    if "ctxs" in entry:
        texts = [
            f"{one['title']}\n\n{one['text']}" if one.get("title") else one["text"]
            for one in entry["ctxs"]
        ]
        return tuple(t for t in texts if t.strip()), str(entry["question"]), right
    return split(str(entry["context"]), page_words), str(entry["input"]), right


def split(context: str, page_words: int) -> tuple[str, ...]:
    """A long text as documents, nothing lost but blank space around them."""
    passages = [part.strip() for part in _PASSAGE.split(context) if part.strip()]
    if len(passages) > 1:
        return tuple(passages)
    documents: list[str] = []
    page: list[str] = []
    for paragraph in context.split("\n"):
        page.append(paragraph)
        if sum(len(one.split()) for one in page) >= page_words:
            documents.append("\n".join(page))
            page = []
    documents.append("\n".join(page))
    return tuple(document.strip() for document in documents if document.strip())
