"""The code blocks of the README and of the site, as a reader meets them, page by page."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "src" / "looseleaf" / "assets" / "MODEL_CARD.md",
    ROOT / "training" / "NOTES.md",
    ROOT / "CHANGELOG.md",
]
LANGUAGES = ("python", "sh", "json", "toml", "text")
_MARKER = re.compile(r"<!-- not run: (.*) -->")
_COMMAND = re.compile(
    r"(\.venv/bin/)?(looseleaf|python3?|pip|make|curl|export|git|docker)\b|\. \.venv/bin"
)


@dataclass(frozen=True)
class Block:
    """One block: its page, the number of its first line, its language and text, and why it is not
    run, where a marker before it says so.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All blocks of a page; one without a fence is ``sh`` if it begins with a command."""
    return list(_blocks(page, page.read_text("utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    number, reason = 0, None
    while number < len(lines):
        line = lines[number]
        fence = re.match(r"( *)```(\w*)", line)
        indented = line.startswith("    ") and (number == 0 or not lines[number - 1].strip())
        if fence:
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            text = [one.removeprefix(fence[1]) for one in lines[number + 1 : end]]
            yield Block(page, number + 1, fence[2], "\n".join(text), reason)
            number = end
        elif indented and not _continues_a_list(lines, number):
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            text = [one[4:] for one in lines[number:end]]
            language = "sh" if _COMMAND.match(text[0]) else "text"
            yield Block(page, number + 1, language, "\n".join(text).rstrip(), reason)
            number = end - 1
        if marker := _MARKER.fullmatch(line.strip()):
            reason = marker[1]
        elif line.strip():
            reason = None
        number += 1


def _continues_a_list(lines: list[str], number: int) -> bool:
    """Whether the indented line belongs to a list item or to an API entry (``:::``) above it."""
    above = next((one for one in reversed(lines[:number]) if one and not one[0].isspace()), "")
    return above.startswith(("- ", "* ", ":::")) or bool(re.match(r"\d+\. ", above))
