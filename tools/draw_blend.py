"""Draws docs/blend_arms.png from results/blend.csv: exact match against what was computed again.

python tools/draw_blend.py"""

import csv
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
TASKS = ("chain", "lookup", "bridge")
SELECTORS = ("links", "question", "deviation", "oracle", "first", "random")
LEVELS = {
    "full attention": "full prefill",
    "documents reused": "full reuse",
    "map-reduce": "MapReduce",
    "ape": "APE",
}


def points_of(path: Path, task: str) -> dict[str, list[tuple[float, float]]]:
    """For each arm of a task (share computed again, exact match), both means over settings."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["task"] == task:
                found[row["arm"]][row["metric"]].append(float(row["value"]))
    points = defaultdict(list)
    for arm, metrics in found.items():
        again = metrics["documents_recomputed"] or [0.0]
        exact = metrics["exact"]
        points[arm.split(",")[0]].append((sum(again) / len(again), sum(exact) / len(exact)))
    return {name: sorted(values) for name, values in points.items()}


def draw(source: Path, target: Path) -> None:
    """A panel a task, one line a selector; arms without a budget are level lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(TASKS), figsize=(11, 4), sharey=True, width_ratios=(2, 1, 1)
    )
    for task, axes in zip(TASKS, panels, strict=True):
        points = points_of(source, task)
        for name in SELECTORS:
            if name in points:
                share, right = zip(*points[name], strict=True)
                axes.plot(
                    [100 * x for x in share], [100 * y for y in right], marker="o", label=name
                )
        for (name, label), style in zip(LEVELS.items(), ("-", "--", ":", "-."), strict=True):
            if name in points:
                axes.axhline(100 * points[name][0][1], color="gray", linestyle=style, label=label)
        axes.set_title(task)
        axes.set_xlim(0, 27)
        axes.grid(alpha=0.3)
    figure.supxlabel("document tokens computed again, %", fontsize=10)
    panels[0].set_ylabel("exact match, %")
    panels[0].set_ylim(-2, 103)
    panels[0].legend(fontsize=8, ncol=2, loc="center right")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw(ROOT / "results" / "blend.csv", ROOT / "docs" / "blend_arms.png")
