"""Draws docs/revise.png from results/interview.csv: right answers by budget, 95 % intervals."""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
SETTING = "30 questions, 8 documents"
STYLES = {
    "quest": ("#5580b0", "o", "Quest"),
    "quest, revise 2": ("#d5a75f", "s", "Quest, w = 2"),
    "quest, revise 4": ("#c8783c", "D", "Quest, w = 4"),
    "quest, revise 8": ("#b0472f", "^", "Quest, w = 8"),
    "window": ("#a39c8c", "v", "window (StreamingLLM)"),
    "snapkv": ("#8d6aa0", "P", "SnapKV"),
    "tova": ("#5d8f52", "X", "TOVA"),
    "h2o": ("#2b6b6b", "*", "H2O"),
}


def split(arm: str) -> tuple[str, float]:
    """``quest, ratio 0.03, revise 4`` as its style's name and the budget."""
    policy, ratio, *rest = arm.split(", ")
    return ", ".join([policy, *rest]), float(ratio.removeprefix("ratio "))


def main() -> None:
    with (ROOT / "results" / "interview.csv").open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["metric"] == "exact" and row["setting"] == SETTING
        ]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), dpi=110)
    full = next(row for row in rows if row["arm"] == "full attention")
    axes.axhline(100 * float(full["value"]), color="#2b2822", linewidth=1, linestyle="--")
    for name, (color, marker, label) in STYLES.items():
        found = sorted(
            (split(row["arm"])[1], *(100 * float(row[c]) for c in ("value", "low", "high")))
            for row in rows
            if row["arm"] != "full attention" and split(row["arm"])[0] == name
        )
        if found:
            budget, value, low, high = (list(column) for column in zip(*found, strict=True))
            spread = [
                [v - lo for v, lo in zip(value, low, strict=True)],
                [hi - v for v, hi in zip(value, high, strict=True)],
            ]
            x = [100 * b for b in budget]
            axes.errorbar(
                x, value, spread, color=color, marker=marker, label=label, capsize=3, linewidth=1.4
            )
    axes.set_xlabel("share of the context that is read, percent")
    axes.set_ylabel("questions answered right, percent")
    axes.set_ylim(-3, 103)
    axes.legend(fontsize=8, loc="center right")
    axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "revise.png")


if __name__ == "__main__":
    main()
