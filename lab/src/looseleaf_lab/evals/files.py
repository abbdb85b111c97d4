"""Questions and summaries from files, in the two public shapes that users bring.

*CacheBlend*: a JSON list of ``{"question", "answers", "ctxs": [{"title", "text"}, ...]}``.
*LongBench*: JSON lines of ``{"input", "context", "answers"}``; ``context`` is one text, cut into
documents here: at its "Passage 1:" headings, or else after so many words at a paragraph's end."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looseleaf.errors import InvalidOption
from looseleaf_lab.evals.scores import METRICS
from looseleaf_lab.evals.task import Item

QUESTIONS = "Answer the question from the given passages, with a few words only."
SUMMARIES = "Summarize the given text."
_PASSAGE = re.compile(r"(?m)^(?=Passage \d+:)")


@dataclass(frozen=True)
class FileTask:
    """The entries of one file; a "seed" is an entry's number. The first of ``metrics`` is the one
    to look at. ``called`` is what rows name the file by."""

    called: str
    entries: tuple[Item, ...]
    metrics: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"file {self.called}"

    @property
    def setting(self) -> str:
        numbers = [len(entry.documents) for entry in self.entries]
        low, high = min(numbers), max(numbers)
        return f"{low} documents" if low == high else f"{low} to {high} documents"

    def items(self, seeds: range) -> Sequence[Item]:
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


def read_tasks(paths: Sequence[Path], reading: Reading) -> list[FileTask]:
    """A task for each file. It is called by the file's name, without its ending; where several
    have the same, by as much of the path as tells them apart. Raises InvalidOption as `read_task`
    does, and for a file that is given twice."""
    whole = [path.resolve() for path in paths]
    for path, times in Counter(whole).items():
        if times > 1:
            raise InvalidOption(f"{path} is given twice: each file is asked about once")
    names, depth = [path.stem for path in paths], 0
    while len(set(names)) < len(names):
        depth += 1
        shared = {name for name, times in Counter(names).items() if times > 1}
        longer = ["/".join(path.parts[-depth:]) for path in whole]
        names = [new if old in shared else old for old, new in zip(names, longer, strict=True)]
    return [read_task(path, reading, name) for path, name in zip(paths, names, strict=True)]


def read_task(path: Path, reading: Reading, called: str | None = None) -> FileTask:
    """The task of a file, called by its own name if by no other. Raises InvalidOption if it has
    neither of the two shapes, or an entry that no answer could be right for."""
    unknown = [name for name in reading.metrics if name not in METRICS]
    if unknown or not reading.metrics:
        raise InvalidOption(f"unknown metric {unknown}: there are {', '.join(METRICS)}")
    if reading.page_words < 1:
        raise InvalidOption(f"--page-words must be at least 1, not {reading.page_words}")
    summary = reading.metrics[0] == "rouge-l"
    instruction = reading.instruction
    if instruction is None:
        instruction = SUMMARIES if summary else QUESTIONS
    items = []
    for number, entry in enumerate(_entries(path)):
        try:
            documents, question, answers = _parts(entry, reading.page_words)
        except InvalidOption as error:
            raise InvalidOption(f"entry {number} of {path}: {error}") from error
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
    return FileTask(called or path.stem, tuple(items), reading.metrics)


def _entries(path: Path) -> list[Any]:
    try:
        # what Windows writes begins with a byte order mark
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{path} can't be read: {error}") from error
    if text.lstrip().startswith("["):
        whole: list[Any] = _parsed(text, str(path))
        return whole
    # only a line feed ends a line: JSON may hold other characters that splitlines takes for one
    lines = enumerate(text.split("\n"), 1)
    return [_parsed(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        wanted = "a file holds a JSON list, or JSON lines: one object a line"
        raise InvalidOption(f"{where}: this is no JSON: {error} ({wanted})") from error
    except RecursionError as error:
        raise InvalidOption(f"{where}: this is no JSON: it is nested too deep") from error


def _parts(entry: Any, page_words: int) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Documents, question and right answers of an entry of either shape."""
    right = _right(entry["answers"])
    if "ctxs" in entry:
        question = _text(entry["question"], "`question`")
        titled = [
            (one.get("title"), _text(one["text"], "a text of `ctxs`")) for one in entry["ctxs"]
        ]
        texts = [f"{title}\n\n{text}" if title else text for title, text in titled]
        return tuple(t for t in texts if t.strip()), question, right
    context, question = _text(entry["context"], "`context`"), _text(entry["input"], "`input`")
    return split(context, page_words), question, right


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidOption(f"{name} is {_shown(value)}: give a text")
    return value


def _right(answers: Any) -> tuple[str, ...]:
    """All right answers. What is none would be counted as a wrong answer of every arm."""
    listed = answers if isinstance(answers, list) else [answers]
    # CacheBlend's own files have a list of wordings for each answer
    flat = [one for many in listed for one in (many if isinstance(many, list) else [many])]
    if not flat or any(
        isinstance(one, bool) or not isinstance(one, str | int | float) for one in flat
    ):
        raise InvalidOption(
            f"`answers` is {_shown(answers)}: give a text, or a list of texts with one at least"
        )
    return tuple(str(one) for one in flat)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
