"""Lists prose and names that need a second reading: comments, docstrings, Markdown, variables.

    python -m tools.prose [PATH ...]          files or folders (default: src, lab, docs, README.md)
    python -m tools.prose --added BASE        only lines added since the commit BASE
    python -m tools.prose --at-most 20        exit code 1 if there are more hits

Prints ``FILE:LINE: rule: text`` for each hit and the count last. A hit is a place to look at. The
rules: a noun of the field instead of a pronoun, sentences of bounded length, nouns as names of
variables, no commit hashes in pages.
"""

import argparse
import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOTS = ("src", "lab", "docs", "README.md")
HISTORIES = ("log.md", "CHANGELOG.md")
LONGEST_SENTENCE, LONGEST_IN_MARKDOWN = 26, 34
PRONOUN = re.compile(
    r"(?:^|[.:;,(]\s+|\b(?:of|to|by|for|with|and|that|as)\s+)(?:what|who|whoever|nobody|somebody|whatever)\b"
    r"|\b(?:so many|hears? of|hear that|tells? so|stands? (?:in|at|behind|for itself)|comes? behind"
    r"|on its way out|is asked for|of its own eyes|lets? go|goes? on\b.*\bwherever)\b",
    re.I,
)
PARTICIPLES = frozenset(
    (
        "found",
        "told",
        "held",
        "made",
        "given",
        "asked",
        "some",
        "one",
        "others",
        "left",
        "done",
        "wanted",
    )
)
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,12}\b")
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+")
CODE_SPAN = re.compile(r"``?[^`]*``?")
MARKDOWN_OTHER = ("|", "    ", "<", "```", "![")


class Hit(NamedTuple):
    """One place to look at."""

    path: Path
    line: int
    rule: str
    text: str


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line numbers and lines of all docstrings."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            for offset, line in enumerate(first.value.value.splitlines()):
                yield first.lineno + offset, line


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts of all comments."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


def markdown(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and lines of a page's paragraphs, without code, tables and pictures."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.lstrip().startswith(MARKDOWN_OTHER):
            yield number, line


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line numbers and names of variables and parameters that are no nouns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name in PARTICIPLES:
            yield node.lineno, name


def hits_of(path: Path) -> Iterator[Hit]:
    """All hits of one Python file or page."""
    is_page = path.suffix == ".md"
    longest = LONGEST_IN_MARKDOWN if is_page else LONGEST_SENTENCE
    if is_page:
        prose = list(markdown(path))
    else:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = [*docstrings(tree), *comments(path)]
        for number, name in names(tree):
            yield Hit(path, number, "a noun as a name", name)
    for number, text in prose:
        sentences = SENTENCE_END.split(CODE_SPAN.sub("X", text))
        if PRONOUN.search(text):
            yield Hit(path, number, "a noun of the field instead", text)
        elif any(len(sentence.split()) > longest for sentence in sentences):
            yield Hit(path, number, f"over {longest} words", text)
        elif is_page and COMMIT.search(text):
            yield Hit(path, number, "a commit in prose", text)


def lines_since(base: str) -> dict[Path, set[int]]:
    """Line numbers that were added since ``base``, by file."""
    command = ["git", "diff", "-U0", base]
    diff = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines: dict[Path, set[int]] = {}
    path, number = None, 0
    for row in diff.splitlines():
        if row.startswith("+++ "):
            path = Path(row[6:]) if row.startswith("+++ b/") else None
        elif (start := re.match(r"@@ -\S+ \+(\d+)", row)) is not None:
            number = int(start[1])
        elif row.startswith("+") and path is not None:
            lines.setdefault(path, set()).add(number)
            number += 1
    return lines


def files_in(roots: list[str]) -> Iterator[Path]:
    """Python files and pages of files and folders, histories left out."""
    for root in map(Path, roots):
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.suffix in (".py", ".md") and path.name not in HISTORIES:
                yield path


def main() -> int:
    """Print all hits; 1 if there are more than ``--at-most``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", default=list(ROOTS))
    parser.add_argument("--added", metavar="BASE", help="only lines added since this commit")
    parser.add_argument("--at-most", type=int, help="exit code 1 if there are more hits")
    options = parser.parse_args()
    added = None if options.added is None else lines_since(options.added)
    paths = [p for p in files_in(options.paths) if added is None or p in added]
    hits = [
        hit for path in paths for hit in hits_of(path) if added is None or hit.line in added[path]
    ]
    for hit in hits:
        print(f"{hit.path}:{hit.line}: {hit.rule}: {hit.text.strip()[:110]}")
    print(f"{len(hits)} places in {len(paths)} files")
    return int(options.at_most is not None and len(hits) > options.at_most)


if __name__ == "__main__":
    sys.exit(main())
