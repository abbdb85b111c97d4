"""The model card's tables of accuracies, compared with measured figures."""

import re
from collections.abc import Sequence
from importlib.resources import files

from looseleaf_lab.evals.figures import Figure

_ROW = re.compile(r"^\| (lookup|bridge|chain|unanswerable)[^|:]*?(?:(\d hops?))? \|(.*)\|$")
_COLUMNS = (
    ("causal", "full attention"), ("causal", "documents reused"),
    ("block", "full attention"), ("block", "documents reused"),
)  # fmt: skip
_LONG_ROW = re.compile(r"^\| (chain|roll-call|needle): ([^|]+) \| ([\d.]+) \|")
_USUAL = "6 documents"
PublishedShares = dict[tuple[str, str, str, str], float]
"""Shares by model, task, setting and arm."""


def read_card() -> PublishedShares:
    """The accuracies in the package's model card."""
    text = (files("looseleaf.assets") / "MODEL_CARD.md").read_text(encoding="utf-8")
    published: PublishedShares = {}
    for line in text.splitlines():
        if (row := _ROW.match(line)) is not None:
            task, hops, cells = row.groups()
            setting = f"{hops}, {_USUAL}" if task == "chain" else _USUAL
            for (model, arm), cell in zip(_COLUMNS, cells.split("|"), strict=True):
                published[model, task, setting, arm] = float(cell) / 100
        elif (row := _LONG_ROW.match(line)) is not None:
            task, setting, cell = row.groups()
            published["causal", task, setting, "full attention"] = float(cell) / 100
    return published


def compare(figures: Sequence[Figure], published: PublishedShares) -> tuple[list[str], bool]:
    """A line per figure that the card has, and whether all values of the card are within the
    measured intervals."""
    lines, agree = [], True
    for figure in figures:
        stated = published.get((figure.model, figure.task, figure.setting, figure.arm))
        if stated is None or figure.metric not in ("exact", "lines"):
            continue
        inside = figure.low <= stated <= figure.high
        agree = agree and inside
        setting = figure.setting.removesuffix(_USUAL).rstrip(", ")
        name = f"{figure.model} {figure.task} {setting}".rstrip() + f", {figure.arm}"
        lines.append(
            f"{name:52} card {stated:6.1%}, measured {figure.value:6.1%}"
            + ("" if inside else f"  outside {figure.low:.1%} to {figure.high:.1%}")
        )
    return lines, agree
