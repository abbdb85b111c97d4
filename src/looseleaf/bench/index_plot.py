"""Recall against scanned share, one panel a layer, one line an index."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from looseleaf.bench.results import Row
from looseleaf.errors import InvalidOption


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the plot of `measure`'s rows. Raises InvalidOption without matplotlib."""
    if find_spec("matplotlib") is None:
        raise InvalidOption("a plot needs matplotlib: pip install 'looseleaf[evals]'")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = list(dict.fromkeys(str(row["layer"]) for row in rows))
    figure, panels = pyplot.subplots(
        1, len(layers), figsize=(4.2 * len(layers), 3.8), sharey=True, squeeze=False
    )
    for panel, layer in zip(panels[0], layers, strict=True):
        own = [row for row in rows if row["layer"] == layer]
        for name in dict.fromkeys(str(row["index"]) for row in own):
            points = [row for row in own if row["index"] == name]
            scanned = [100 * float(row["scanned"]) for row in points]
            recall = [float(row["recall"]) for row in points]
            chosen = name.startswith("chosen")
            style = {"marker": "*", "markersize": 13, "color": "black"} if chosen else {}
            panel.plot(scanned, recall, **{"marker": "o", "markersize": 4, "label": name, **style})
        panel.axhline(0.95, color="grey", linewidth=0.7, linestyle=":")
        panel.set_xscale("log")
        panel.set_xlabel("keys compared, %")
        panel.set_title(f"{layer}, {own[0]['keys']} keys", fontsize=10)
        panel.legend(fontsize=6.5, loc="lower right")
    panels[0][0].set_ylabel("recall@100")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
