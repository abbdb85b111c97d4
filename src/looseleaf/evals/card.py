"""The model card's table of accuracies, read from the card itself, beside what is measured now."""

import re
from collections.abc import Sequence
from importlib.resources import files

from looseleaf.evals.figures import Figure

_ROW = re.compile(r"^\| (lookup|bridge|chain|unanswerable)[^|]*?(?:(\d) hops?)? \|(.*)\|$")
_COLUMNS = (
    ("causal", "full attention"), ("causal", "documents reused"),
    ("block", "full attention"), ("block", "documents reused"),
)  # fmt: skip
Published = dict[tuple[str, str, str, str], float]
"""Shares by model, task, hops and arm."""


def read_card() -> Published:
    """The accuracies that the card in the package states."""
    text = (files("looseleaf.assets") / "MODEL_CARD.md").read_text(encoding="utf-8")
    published: Published = {}
    for line in text.splitlines():
        row = _ROW.match(line)
        if row is not None:
            task, hops, cells = row.groups()
            chain = hops if task == "chain" else ""
            for (model, arm), cell in zip(_COLUMNS, cells.split("|"), strict=True):
                published[model, task, chain or "", arm] = float(cell) / 100
    return published


def compare(figures: Sequence[Figure], published: Published) -> tuple[list[str], bool]:
    """A line for each figure that the card has, and whether all of the card's lie within the
    intervals measured."""
    lines, agree = [], True
    for figure in figures:
        hops = figure.setting[0] if figure.task == "chain" else ""
        stated = published.get((figure.model, figure.task, hops, figure.arm))
        if stated is None or figure.metric != "exact":
            continue
        inside = figure.low <= stated <= figure.high
        agree = agree and inside
        name = f"{figure.model} {figure.task}{f' {hops}' if hops else ''}, {figure.arm}"
        lines.append(
            f"{name:40} card {stated:6.1%}, measured {figure.value:6.1%}"
            + ("" if inside else f"  outside {figure.low:.1%} to {figure.high:.1%}")
        )
    return lines, agree
