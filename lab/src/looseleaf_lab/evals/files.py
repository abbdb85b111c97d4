"""Questions and summaries from files of three formats.

*CacheBlend*: a JSON list of ``{"question", "answers", "ctxs": [{"title", "text"}, ...]}``.
*LongBench*: JSON lines of ``{"input", "context", "answers"}``. Its ``context`` is one text, split
into documents at "Passage 1:" headings, or else at the first paragraph end after some words.
*Passages*: JSON lines of ``{"question", "answers", "documents": [{"title", "text"}, ...]}``."""

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
    """The entries of one file; a "seed" is an entry's number. The first of ``metrics`` is the main
    one. Rows name the file by ``label``."""

    label: str
    entries: tuple[Item, ...]
    metrics: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"file {self.label}"

    @property
    def setting(self) -> str:
        numbers = [len(entry.documents) for entry in self.entries]
        low, high = min(numbers), max(numbers)
        return f"{low} documents" if low == high else f"{low} to {high} documents"

    def items(self, seeds: range) -> Sequence[Item]:
        return self.entries[seeds.start : seeds.stop]

    def score(self, item: Item, text: str) -> dict[str, float]:
        """Each metric of the text against the best of the right answers."""
        return {name: METRICS[name](text.strip(), item.answers) for name in self.metrics}


@dataclass(frozen=True)
class FileOptions:
    """Options for files. ``page_words`` is a document's length in a context without passages."""

    metrics: tuple[str, ...] = ("f1", "exact", "contains")
    instruction: str | None = None
    max_tokens: int = 64
    page_words: int = 400


def read_tasks(paths: Sequence[Path], options: FileOptions) -> list[FileTask]:
    """A task per file, named by the file's stem, or by the shortest unique end of its path.

    Raises InvalidOption as `read_task` does, and for a file that is given twice."""
    resolved = [path.resolve() for path in paths]
    for path, count in Counter(resolved).items():
        if count > 1:
            raise InvalidOption(f"{path} is given twice: name each file once")
    names, depth = [path.stem for path in paths], 0
    while len(set(names)) < len(names):
        depth += 1
        ambiguous = {name for name, count in Counter(names).items() if count > 1}
        qualified = ["/".join(path.parts[-depth:]) for path in resolved]
        names = [
            new if old in ambiguous else old for old, new in zip(names, qualified, strict=True)
        ]
    return [read_task(path, options, name) for path, name in zip(paths, names, strict=True)]


def read_task(path: Path, options: FileOptions, label: str | None = None) -> FileTask:
    """The task of a file; ``label`` replaces the file's stem as its name.

    Raises InvalidOption for another format, and for an entry without a valid answer."""
    unknown = [name for name in options.metrics if name not in METRICS]
    if unknown or not options.metrics:
        raise InvalidOption(f"unknown metric {unknown}: the metrics are {', '.join(METRICS)}")
    if options.page_words < 1:
        raise InvalidOption(f"--page-words must be at least 1, not {options.page_words}")
    summary = options.metrics[0] == "rouge-l"
    instruction = options.instruction
    if instruction is None:
        instruction = SUMMARIES if summary else QUESTIONS
    items = []
    for number, entry in enumerate(_entries(path)):
        try:
            documents, question, answers = _parts(entry, options.page_words)
        except InvalidOption as error:
            raise InvalidOption(f"entry {number} of {path}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidOption(
                f"entry {number} of {path} has neither question, answers and ctxs nor input, "
                "answers and context"
            ) from error
        prompt = question or instruction
        item = Item(str(number), documents, prompt, answers, options.max_tokens, instruction)
        items.append(item)
    if not items:
        raise InvalidOption(f"{path} has no entries")
    return FileTask(label or path.stem, tuple(items), options.metrics)


def _entries(path: Path) -> list[Any]:
    try:
        # Windows editors begin a file with a byte order mark
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{path} can't be read: {error}") from error
    if text.lstrip().startswith("["):
        entries: list[Any] = _parse(text, str(path))
        return entries
    # only a line feed ends a line: splitlines would also split at characters inside JSON strings
    lines = enumerate(text.split("\n"), 1)
    return [_parse(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _parse(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        expected = "a file has a JSON list, or JSON lines: one object a line"
        raise InvalidOption(f"{location}: this is no JSON: {error} ({expected})") from error
    except RecursionError as error:
        raise InvalidOption(f"{location}: this is no JSON: it is nested too deep") from error


def _parts(entry: Any, page_words: int) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Documents, question and right answers of an entry in either format."""
    answers_of_entry = _answer_texts(entry["answers"])
    field = next((name for name in ("ctxs", "documents") if name in entry), None)
    if field is not None:
        question = _text(entry["question"], "`question`")
        titled = [
            (passage.get("title"), _text(passage["text"], f"a text of `{field}`"))
            for passage in entry[field]
        ]
        texts = [f"{title}\n\n{text}" if title else text for title, text in titled]
        return tuple(t for t in texts if t.strip()), question, answers_of_entry
    context, question = _text(entry["context"], "`context`"), _text(entry["input"], "`input`")
    return split(context, page_words), question, answers_of_entry


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidOption(f"{name} is {_shorten(value)}: give a text")
    return value


def _answer_texts(answers: Any) -> tuple[str, ...]:
    """All right answers. Raises InvalidOption for other values, which no answer could match."""
    answer_list = answers if isinstance(answers, list) else [answers]
    # CacheBlend's own files have a list of wordings per answer
    flat = [
        text
        for wordings in answer_list
        for text in (wordings if isinstance(wordings, list) else [wordings])
    ]
    if not flat or any(
        isinstance(text, bool) or not isinstance(text, str | int | float) for text in flat
    ):
        raise InvalidOption(
            f"`answers` is {_shorten(answers)}: give a text, or a list with at least one text"
        )
    return tuple(str(text) for text in flat)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def split(context: str, page_words: int) -> tuple[str, ...]:
    """A long text as documents; only white space around them is dropped."""
    passages = [part.strip() for part in _PASSAGE.split(context) if part.strip()]
    if len(passages) > 1:
        return tuple(passages)
    documents: list[str] = []
    page: list[str] = []
    for paragraph in context.split("\n"):
        page.append(paragraph)
        if sum(len(text.split()) for text in page) >= page_words:
            documents.append("\n".join(page))
            page = []
    documents.append("\n".join(page))
    return tuple(document.strip() for document in documents if document.strip())
