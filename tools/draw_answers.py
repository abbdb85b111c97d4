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
_MARKS = "os^Dv<>PX*"
_MORE_COLORS = ("black", "navy", "darkred", "olive", "teal")


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
    return {group: [*rows.values()] for group, rows in latest.items()}


def _extent(row: Row) -> tuple[int, bool]:
    return int(row["questions"]), bool(row["same_choice"])


def board(path: Path) -> str:
    """The tables of the page, one per model, file, part and machine."""
    texts = []
    for (model, file, part, hardware), rows in read_groups(path).items():
        largest = max(rows, key=_extent)
        title = (
            f"### {model}, {file}, {PART_NAMES[part]}\n\n{largest['questions']} questions, "
            f"{float(largest['tokens']):.0f} document tokens on average; {_machine(hardware)}.\n"
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


def draw(path: Path, target: Path) -> None:
    """KL against first-token time, a panel per model and file; lines join shares of a policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {group: rows for group, rows in read_groups(path).items() if group[2] in DRAWN}
    height = 4.2 * len(groups)
    figure, panels = pyplot.subplots(len(groups), 1, figsize=(8.5, height), squeeze=False)
    for axes, ((model, file, part, _), rows) in zip(panels[:, 0], groups.items(), strict=True):
        _panel(axes, rows)
        axes.set_title(f"{model}, {file}, {PART_NAMES[part]}", loc="left", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=110, metadata={"Software": None})


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        families[family_of(row["arm"])].append(row)
    for index, (family, members) in enumerate(families.items()):
        points = sorted(members, key=lambda row: float(row["recomputed"]))
        times = [float(row["first_token"]) for row in points]
        kl, low, high = (
            [float(row[name]) for row in points] for name in ("kl", "kl_low", "kl_high")
        )
        bars = [
            [max(0.0, k - b) for k, b in zip(kl, low, strict=True)],
            [max(0.0, t - k) for k, t in zip(kl, high, strict=True)],
        ]
        mark, color = _MARKS[index % len(_MARKS)], f"C{index % 10}"
        if index >= 10:
            color = _MORE_COLORS[index % len(_MORE_COLORS)]
        axes.errorbar(
            times,
            kl,
            yerr=bars,
            marker=mark,
            color=color,
            label=family,
            capsize=2,
            linewidth=1,
            elinewidth=0.6,
        )
    axes.set_xscale("log")
    axes.set_xlabel("time of the first token, s")
    axes.set_ylabel("KL from full prefill, nats a token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


if __name__ == "__main__":
    data = ROOT / "results" / "answers.csv"
    draw(data, ROOT / "docs" / "answers.png")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BOARD.sub(lambda m: m[1] + board(data) + m[2], page), encoding="utf-8")
