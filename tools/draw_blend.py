"""Draws docs/blend_arms.png and docs/blend_layers.png, and prints the tables of docs/blend.md.

The data is results/blend.csv (`looseleaf eval world`), results/blend_study.csv
(tools/study_blend.py) and results/calibrate.csv (`looseleaf calibrate`).

python tools/draw_blend.py"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CHAIN = tuple(f"{n} hop{'s' if n > 1 else ''}, 6 documents" for n in (1, 2, 3))
DEEP, TEN = "4 hops, 6 documents", "3 hops, 10 documents"
SETTINGS: Mapping[str, Sequence[str]] = {
    "chain": CHAIN,
    "lookup": ("6 documents",),
    "bridge": ("6 documents",),
}
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3)
DEFAULT_RATIO = 0.15
SELECTORS = {
    "random": "random",
    "first": "first",
    "deviation, layers 1": "deviation at layer 1 (the paper's)",
    "deviation": "deviation at layer 2",
    "question": "question",
    "links": "links",
    "oracle": "oracle (true deviation, all layers)",
}
OTHER_LAYERS = {
    "deviation, layers 1": "deviation at layer 1",
    "deviation": "deviation at layer 2",
    "deviation, layers 3": "deviation at layer 3",
    "question, watched_share 0.125": "question, last layer",
    "question": "question, last two layers",
    "question, watched_share 1": "question, all layers",
    "links, watched_share 0.125": "links, seed from the last layer",
    "links": "links, seed from the last two layers",
    "links, watched_share 1": "links, seed from all layers",
}
LEVELS = {
    "full attention": "full prefill",
    "prefix caching": "prefix caching",
    "documents reused": "full reuse",
    "map-reduce": "MapReduce",
    "map-rerank": "MapRerank",
    "ape": "APE (temperature and scale 0.9)",
}
RESTORED = {
    "nothing": "nothing",
    "the whole sentence": "the whole sentence",
    "the name it refers to": "the name it refers to",
    "its own name": "its own name",
    "both names": "both names",
    "the sentence without it": 'the sentence without the word "stays"',
    "the one word": '**the one word "stays"**',
}


@dataclass(frozen=True)
class Rows:
    """Rows of a file of results."""

    rows: Sequence[Mapping[str, str]]

    @classmethod
    def read(cls, path: Path) -> "Rows":
        with path.open(newline="", encoding="utf-8") as file:
            return cls(list(csv.DictReader(file)))

    def find(self, **values: str) -> Mapping[str, str] | None:
        """The row with these values, None if missing. Raises SystemExit for several rows."""
        matches = [r for r in self.rows if all(r[k] == v for k, v in values.items())]
        if len(matches) > 1:
            raise SystemExit(f"{len(matches)} rows of {values}: delete the rows of other weights")
        return matches[0] if matches else None

    def mean(
        self, task: str, settings: Sequence[str], arm: str, metric: str = "exact"
    ) -> float | None:
        """The mean over settings in percent, None if a row is missing."""
        matches = [self.find(task=task, setting=s, arm=arm, metric=metric) for s in settings]
        values = [float(row["value"]) for row in matches if row is not None]
        return 100 * sum(values) / len(values) if len(values) == len(settings) else None


def arm_of(selector: str, ratio: float) -> str:
    """The name of an arm in rows, as `deviation, ratio 0.15, layers 1`."""
    name, *options = selector.split(", ")
    return ", ".join([name, f"ratio {ratio:g}", *options])


def cell(value: float | None) -> str:
    return "not run" if value is None else f"{value:.1f}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def percent(ratios: Sequence[float]) -> list[str]:
    return [f"{100 * ratio:g} %" for ratio in ratios]


def tables(results: Path) -> dict[str, str]:
    """The quality tables of docs/blend.md by name, from a folder of results."""
    blend, study = Rows.read(results / "blend.csv"), Rows.read(results / "blend_study.csv")
    default_arms = {name: arm_of(name, DEFAULT_RATIO) for name in SELECTORS}
    by_ratio = {
        task: table(
            [f"{task}, tokens chosen by", *percent(RATIOS), "computed again at 15 %"],
            [
                [
                    label,
                    *(cell(blend.mean(task, own, arm_of(name, r))) for r in RATIOS),
                    cell(blend.mean(task, own, default_arms[name], "documents_recomputed")),
                ]
                for name, label in SELECTORS.items()
                if blend.mean(task, own, default_arms[name]) is not None
            ],
        )
        for task, own in SETTINGS.items()
        if task != "lookup"  # all cells are 100.0
    }
    arms = {**{label: name for name, label in LEVELS.items()}}
    arms |= {f"{label}, 15 %": default_arms[name] for name, label in SELECTORS.items()}
    hops = [*((s,) for s in CHAIN), (DEEP,)]
    return {
        **by_ratio,
        "levels": table(
            ["arm", "chain, 1 hop", "2 hops", "3 hops", "4 hops", "lookup", "bridge"],
            [
                [
                    label,
                    *(cell(blend.mean("chain", own, arm)) for own in hops),
                    *(cell(blend.mean(t, SETTINGS[t], arm)) for t in ("lookup", "bridge")),
                ]
                for label, arm in arms.items()
            ],
        ),
        "layers": _by_ratio(blend, CHAIN, OTHER_LAYERS, RATIOS[:4]),
        "ten": _by_ratio(blend, (TEN,), OTHER_LAYERS, (0.03, 0.05, 0.1, 0.15)),
        "needs": _needs(study),
        "calibrate": _calibrated(Rows.read(results / "calibrate.csv")),
    }


def _by_ratio(
    blend: Rows, settings: Sequence[str], names: Mapping[str, str], ratios: Sequence[float]
) -> str:
    lines = []
    for name, label in names.items():
        values = [blend.mean("chain", settings, arm_of(name, ratio)) for ratio in ratios]
        if any(value is not None for value in values):
            lines.append([label, *map(cell, values)])
    return table(["tokens chosen by", *percent(ratios)], lines)


def _needs(study: Rows) -> str:
    """Right answers by recomputed part of each sentence of the chain."""
    lines = []
    for case, label in RESTORED.items():
        share = study.find(study="tokens", case=case, hops="all")
        right = [study.find(study="right", case=case, hops=n) for n in ("1", "2", "3")]
        assert share is not None
        shares = [f"{100 * float(share[name]):.1f}" for name in ("low", "high")]
        row = [label, f"{'–'.join(dict.fromkeys(shares))} %"]
        lines.append(row + [cell(100 * float(match["value"])) for match in right if match])
    head = ["computed again, of each sentence of the chain", "share of all tokens"]
    return table([*head, "1 hop", "2 hops", "3 hops"], lines)


def _calibrated(rows: Rows) -> str:
    """Calibration of each policy at the default ratio, at 5 % and without a ratio."""
    lines = []
    for row in rows.rows:
        if row["ratio"] not in ("", "0.05", str(DEFAULT_RATIO)):
            continue
        policy = [row["selector"], row["ratio"] and f"{100 * float(row['ratio']):g} %"]
        policy += [row["watched_share"] and f"last {row['watched_share']} of the layers"]
        policy += [row["check_layers"] and f"layer {row['check_layers']}"]
        columns = ("agreement", "text_deviation", "deviation_left", "cost")
        agree, *rest = (f"{100 * float(row[name]):.1f} %" for name in columns)
        lines.append([", ".join(filter(None, policy)), agree, f"{float(row['kl']):.4f}", *rest])
    return table(["policy", "agree", "KL", "text", "left", "cost"], lines)


def draw_arms(blend: Rows, target: Path) -> None:
    """A panel per task with a line per selector; arms without a budget are horizontal lines."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(
        1, len(SETTINGS), figsize=(11, 4.8), sharey=True, width_ratios=(2, 1, 1)
    )
    for (task, settings), axes in zip(SETTINGS.items(), panels, strict=True):
        for number, (name, label) in enumerate(SELECTORS.items()):
            points = []
            for ratio in RATIOS:
                arm = arm_of(name, ratio)
                exact = blend.mean(task, settings, arm)
                recomputed = blend.mean(task, settings, arm, "documents_recomputed")
                if exact is not None and recomputed is not None:
                    points.append((recomputed, exact))
            if points:
                look: dict[str, Any] = {"marker": "o", "markersize": 4, "color": f"C{number}"}
                look |= {"color": "black", "linestyle": ":"} if name == "oracle" else {}
                axes.plot(*zip(*points, strict=True), label=label, **look)
        styles = ("-", (0, (1, 1)), "--", ":", "-.", (0, (5, 1)))
        for (name, label), style in zip(LEVELS.items(), styles, strict=True):
            exact = blend.mean(task, settings, name)
            if exact is not None and label != "prefix caching":
                axes.axhline(exact, color="gray", linestyle=style, label=label, linewidth=1)
        axes.set_title({"chain": "chain, 1 to 3 hops"}.get(task, task))
        axes.set_xlim(0, 27)
        axes.grid(alpha=0.3)
    panels[0].set_xlabel("document tokens computed again by the pass that answers, %")
    panels[0].set_ylabel("exact match, %")
    panels[0].set_ylim(-2, 103)
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, fontsize=8, ncol=4, loc="lower center")
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(target, dpi=110)


def draw_layers(study: Rows, target: Path) -> None:
    """The share of tokens that contains a chain, by layer: median and middle 80 % of worlds."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.8))
    content = (
        ("deviation of keys and values", {"whole chain": ("deviation", "all")}),
        (
            "question's attention over stored documents",
            {
                "chain of 3 hops": ("question, whole chain", "3"),
                "its end alone": ("question, its end", "3"),
            },
        ),
        ("a link's attention to the link before it", {"": ("link", "all")}),
    )
    for axes, (title, lines) in zip(panels, content, strict=True):
        scale = 1 if title.startswith("a link") else 100
        for label, (kind, hops) in lines.items():
            own = [r for r in study.rows if (r["study"], r["hops"]) == (kind, hops)]
            rows = sorted((r for r in own if re.fullmatch(r"\d+", r["case"])), key=_layer)
            layers = [_layer(r) for r in rows]
            low, high, middle = ([scale * float(r[n]) for r in rows] for n in _BAND)
            axes.plot(layers, middle, marker="o", markersize=4, label=label or None)
            axes.fill_between(layers, low, high, alpha=0.2)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("layer")
        axes.set_ylim(0, 1.04 * scale)
        axes.grid(alpha=0.3)
        axes.set_ylabel(
            "attention weight" if scale == 1 else "share of the tokens to choose, %", fontsize=9
        )
        if scale > 1:
            axes.axhline(15, color="gray", linestyle="--", linewidth=1)
        if len(lines) > 1:
            axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


_BAND = ("low", "high", "value")


def _layer(row: Mapping[str, str]) -> int:
    return int(row["case"])


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


if __name__ == "__main__":
    results = ROOT / "results"
    blend, study = Rows.read(results / "blend.csv"), Rows.read(results / "blend_study.csv")
    draw_arms(blend, ROOT / "docs" / "blend_arms.png")
    draw_layers(study, ROOT / "docs" / "blend_layers.png")
    for name, text in tables(results).items():
        print(f"\n{name}\n\n{text}")
