"""Tables in Markdown and HTML."""

import html
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, and lines of as many cells."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in Markdown."""
        rows = [self.columns, tuple("---" for _ in self.columns), *self.lines]
        body = "\n".join(
            f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows
        )
        return f"**{self.title}**\n\n{body}\n"

    def html(self) -> str:
        """The table as an HTML fragment."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
            for line in self.lines
        )
        title = html.escape(self.title)
        return f"<h3>{title}</h3><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def percent_of(row: Mapping[str, str]) -> str:
    """A figure as a cell: value, interval and number of items."""
    value, low, high = (100 * float(row[name]) for name in ("value", "low", "high"))
    return f"{value:.1f} ({low:.1f} to {high:.1f}; {row['items']})"
