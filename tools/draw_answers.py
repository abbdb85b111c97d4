"""Draws docs/answers.png and the tables of docs/answers.md from results/answers.csv.

The rows are those of ``looseleaf eval file --measure``; the latest row of an arm counts.

python -m tools.draw_answers"""

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "answers.md"
PART_NAMES = {"all": "all questions", "develop": "even questions", "decide": "odd questions"}
DRAWN = ("all", "develop")
BOARD = re.compile(r"(?s)(<!-- board -->\n).*(<!-- end of board -->)")
HEADER = (
    "| arm | computed again | loss minus full's | KL | KL removed | same first 12 tokens | F1 | "
    "same choice | first token, s | sooner |"
)
COMPUTED = {"none": "—", "full": "100%", "prefix": "all but the first"}
"""Shares of document tokens computed for a prompt, where passages are text."""
Row = Mapping[str, str]
Group = tuple[str, str, str, str]
COLUMNS = 3
EARLY_LAYER = 2
EXACT = ("full", "prefix")
STYLES = {
    "full": ("black", "*"),
    "prefix": ("gray", "*"),
    "reuse": ("tab:orange", "s"),
    "alone": ("tab:purple", "v"),
    "ape": ("tab:brown", "<"),
    "first": ("tab:pink", ">"),
    "question": ("tab:red", "D"),
    "deviation": ("yellowgreen", "^"),
    "deviation, a later layer": ("darkgreen", "^"),
    "links": ("tab:blue", "o"),
    "ceiling deviation": ("yellowgreen", "x"),
    "ceiling read": ("tab:cyan", "x"),
    "ceiling received": ("navy", "x"),
}
"""Color and mark of each kind of arm; another kind has `OTHER`."""
OTHER = ("dimgray", "P")


def read_groups(path: Path) -> dict[Group, list[Row]]:
    """The latest row of every arm, by model, file, part and hardware."""
    latest: dict[Group, dict[str, Row]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            group = row["model"], row["file"], row["part"], row["hardware"]
            # a later run with fewer questions or measures does not replace an earlier one
            known = latest[group].get(row["arm"])
            if known is None or _extent(known) <= _extent(row):
                latest[group][row["arm"]] = row
    return {group: [*latest[group].values()] for group in sorted(latest)}


def _extent(row: Row) -> tuple[int, bool]:
    return int(row["questions"]), bool(row["same_choice"])


def board(path: Path) -> str:
    """The tables of the page, one per model, file, part and machine."""
    texts = []
    for (model, file, part, hardware), rows in read_groups(path).items():
        largest = max(rows, key=_extent)
        title = (
            f"### {model}, {file}, {PART_NAMES[part]}, {_machine(hardware)}\n\n"
            f"{largest['questions']} questions, "
            f"{float(largest['tokens']):.0f} document tokens on average.\n"
        )
        lines = [HEADER, "|---|" + "---|" * (HEADER.count("|") - 2)]
        lines += [_line(row) for row in rows]
        texts.append("\n".join([title, *lines, ""]))
    return "\n".join(texts)


def _machine(hardware: str) -> str:
    return re.sub(r"\b1 threads\b", "1 thread", hardware)


def _line(row: Row) -> str:
    def number(name: str, form: str) -> str:
        return format(float(row[name]), form)

    def bounds(name: str, form: str) -> str:
        return (
            f"{number(name, form)} [{number(f'{name}_low', form)}, {number(f'{name}_high', form)}]"
        )

    choice = number("same_choice", ".0%") if row["same_choice"] else "—"
    cells = (
        row["arm"],
        COMPUTED.get(row["arm"], number("recomputed", ".0%")),
        bounds("nll", "+.2f"),
        bounds("kl", ".3f"),
        bounds("kl_removed", ".0%"),
        number("agreement", ".0%"),
        number("f1", ".2f"),
        choice,
        number("first_token", ".3f"),
        f"{number('sooner', '.2f')} ×",
    )
    return f"| {' | '.join(cells)} |"


def family_of(arm: str) -> str:
    """An arm without its share: ``deviation, layer 2`` of ``deviation, layer 2, 0.15``."""
    name, _, share = arm.rpartition(", ")
    return name if name and share.replace(".", "").isdigit() else arm


def style_of(family: str) -> tuple[str, str, str, bool]:
    """Label, color and mark of a family, and whether it reads passages behind a primer."""
    behind = family.startswith("primer")
    arm = "reuse" if family == "primer" else family.removeprefix("primer, ")
    name, _, layer = arm.partition(", layer ")
    if layer and int(layer) > EARLY_LAYER:
        name = "deviation, a later layer"
    color, mark = STYLES.get(name, OTHER)
    return name, color, mark, behind


def draw(path: Path, target: Path) -> None:
    """KL against first-token time, a panel per model, file and machine; lines join shares of a
    policy. ``none`` is not drawn: it is several times as far from full prefill as any other arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {group: rows for group, rows in read_groups(path).items() if group[2] in DRAWN}
    lines = -(-len(groups) // COLUMNS)
    size = (5.2 * COLUMNS, 3.6 * lines + 1.2)
    figure, panels = pyplot.subplots(lines, COLUMNS, figsize=size, squeeze=False)
    labels: dict[str, Any] = {}
    for axes in panels.flat[len(groups) :]:
        axes.set_axis_off()
    for axes, ((model, file, part, machine), rows) in zip(
        panels.flat, groups.items(), strict=False
    ):
        labels |= _panel(axes, [row for row in rows if row["arm"] != "none"])
        of_part = "" if part == "all" else f", {PART_NAMES[part]}"
        title = f"{model}\n{file}{of_part}; {_machine(machine)}"
        axes.set_title(title, loc="left", fontsize=9)
    for axes in panels[:, 0]:
        axes.set_ylabel("KL from full prefill, nats a token")
    figure.legend(labels.values(), labels.keys(), loc="lower center", ncols=4, fontsize=9)
    figure.tight_layout(rect=(0, 1.0 / size[1], 1, 1))
    figure.savefig(target, dpi=90, metadata={"Software": None})


def _panel(axes: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """Draws a panel; returns the drawn arms by their labels."""
    from matplotlib.ticker import LogLocator, NullFormatter

    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        families[family_of(row["arm"])].append(row)
    drawn = {}
    for family, members in families.items():
        points = sorted(members, key=lambda row: float(row["recomputed"]))
        times = [float(row["first_token"]) for row in points]
        kl, low, high = (
            [float(row[name]) for row in points] for name in ("kl", "kl_low", "kl_high")
        )
        bars = [
            [max(0.0, k - b) for k, b in zip(kl, low, strict=True)],
            [max(0.0, t - k) for k, t in zip(kl, high, strict=True)],
        ]
        name, color, mark, behind = style_of(family)
        form = {"marker": mark, "color": color, "capsize": 2, "linewidth": 1, "elinewidth": 0.6}
        filling = color if behind or name in EXACT else "white"
        line = axes.errorbar(times, kl, yerr=bars, markerfacecolor=filling, **form)
        drawn[f"{name}, behind a primer" if behind else name] = line
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("time of the first token, s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    return drawn


if __name__ == "__main__":
    data = ROOT / "results" / "answers.csv"
    draw(data, ROOT / "docs" / "answers.png")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BOARD.sub(lambda m: m[1] + board(data) + m[2], page), encoding="utf-8")
