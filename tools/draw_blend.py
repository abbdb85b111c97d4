"""Draws docs/blend_arms.png from results/blend.csv: exact match against what was computed again.

python tools/draw_blend.py"""

import csv
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SELECTORS = ("links", "question", "deviation", "oracle", "first", "random")
LEVELS = {
    "full attention": "full prefill",
    "documents reused": "full reuse",
    "map-reduce": "MapReduce, MapRerank",
    "ape": "APE",
}


def chain_points(path: Path) -> dict[str, list[tuple[float, float]]]:
    """For each arm of the chain task (share computed again, exact match), both means over hops."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["task"] == "chain":
                found[row["arm"]][row["metric"]].append(float(row["value"]))
    points = defaultdict(list)
    for arm, metrics in found.items():
        again = metrics["documents_recomputed"] or [0.0]
        exact = metrics["exact"]
        points[arm.split(",")[0]].append((sum(again) / len(again), sum(exact) / len(exact)))
    return {name: sorted(values) for name, values in points.items()}


def draw(source: Path, target: Path) -> None:
    """One line a selector; arms without a budget are level lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = chain_points(source)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in SELECTORS:
        if name in points:
            share, right = zip(*points[name], strict=True)
            axes.plot([100 * x for x in share], [100 * y for y in right], marker="o", label=name)
    for (name, label), style in zip(LEVELS.items(), ("-", "--", ":", "-."), strict=True):
        if name in points:
            axes.axhline(100 * points[name][0][1], color="gray", linestyle=style, label=label)
    axes.set_xlabel("document tokens computed again, %")
    axes.set_ylabel("exact match, %")
    axes.set_xlim(0, 27)
    axes.set_ylim(-2, 103)
    axes.legend(fontsize=8, ncol=2, loc="center right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw(ROOT / "results" / "blend.csv", ROOT / "docs" / "blend_arms.png")
