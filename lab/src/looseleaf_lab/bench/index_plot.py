"""Plot of recall against scanned share: a panel per layer and number of keys, a line per index."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.results import Cell
from looseleaf_lab.errors import INSTALL

_COLUMNS = 3
_LEAST_SHARE, _MOST_SHARE = 1.0, 130.0
_LEAST_RECALL = 0.02


def draw(rows: Sequence[Mapping[str, Cell]], path: Path) -> None:
    """Write a plot of the rows of ``bench index``. Raises InvalidOption without matplotlib."""
    if find_spec("matplotlib") is None:
        raise InvalidOption(f"a plot needs matplotlib: {INSTALL}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = list(dict.fromkeys((str(row["layer"]), row["keys"]) for row in rows))
    columns = min(_COLUMNS, len(layers))
    num_rows = -(-len(layers) // columns)
    figure, grid = pyplot.subplots(
        num_rows, columns, figsize=(4.2 * columns, 3.4 * num_rows + 0.8), sharey=True, squeeze=False
    )
    panels = list(grid.flat)
    legend_lines: dict[str, Any] = {}
    for panel, (layer, keys) in zip(panels, layers, strict=False):
        layer_rows = [row for row in rows if (row["layer"], row["keys"]) == (layer, keys)]
        _draw_layer(panel, layer_rows, legend_lines)
        panel.set_title(f"{layer}, {int(keys):,} keys", fontsize=10)
    for panel in panels[len(layers) :]:
        panel.set_axis_off()
    for panel_row in grid:
        panel_row[0].set_ylabel("recall@100")
    figure.legend(
        legend_lines.values(), legend_lines.keys(), loc="lower center", ncols=4, fontsize=8
    )
    figure.tight_layout(rect=(0, 0.6 / (3.4 * num_rows + 0.8), 1, 1))
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _draw_layer(
    panel: Any, rows: Sequence[Mapping[str, Cell]], legend_lines: dict[str, Any]
) -> None:
    """A line per index; ``legend_lines`` collects the first line of every name, for the legend."""
    for name in dict.fromkeys(str(row["index"]) for row in rows):
        # rows are in the order of measurement, which is not that of efforts
        points = [row for row in rows if row["index"] == name]
        points.sort(key=lambda row: float(row["scanned"]))
        scanned = [100 * float(row["scanned"]) for row in points]
        recall = [float(row["recall"]) for row in points]
        label = "chosen" if name.startswith("chosen") else name
        style: dict[str, Any] = {"marker": "o", "markersize": 4}
        if label == "chosen":
            style = {"marker": "*", "markersize": 13, "color": "black", "linestyle": "none"}
        elif label in legend_lines:
            style["color"] = legend_lines[label].get_color()
        else:
            style["color"] = f"C{len(legend_lines)}"
        if max(recall) < _LEAST_RECALL:
            # a search that stops at its entry: text, because a lone point would look like a curve
            text = f"{name}: recall {max(recall):.2f}"
            panel.text(0.03, 0.04, text, transform=panel.transAxes, color=style["color"])
            panel.plot([], [], **style)
            legend_lines.setdefault(label, panel.lines[-1])
            continue
        (line,) = panel.plot(scanned, recall, clip_on=label != "chosen", **style)
        legend_lines.setdefault(label, line)
    panel.axhline(0.95, color="grey", linewidth=0.7, linestyle=":")
    panel.set_xscale("log")
    panel.set_xlim(_LEAST_SHARE, _MOST_SHARE)
    panel.set_ylim(0, 1.04)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xlabel("keys compared, %")
