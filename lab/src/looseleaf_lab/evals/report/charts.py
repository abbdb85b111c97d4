"""Plots by matplotlib (extra ``evals``), imported when one is drawn."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from looseleaf.errors import InvalidOption, install
from looseleaf_lab.evals.report.rows import Series

Format = Literal["svg", "png"]
_COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b7791f", "#97266d", "#4a5568", "#319795")
_MARKS = ("o", "^", "s")
_HATCHES = ("", "///", "...")
_FEW = 8
WIDEST = 9.0
"""Inches of the widest picture."""
_DODGE = 0.006
# pixels between two labels of an axis
_LABEL_GAP = 4
_DASHES = ("--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)))


@dataclass(frozen=True)
class Chart:
    """One plot: bars over named groups if ``groups`` are given, else lines over numbers.

    ``points`` are drawn as marks without a line: figures that others published. ``sideways`` is for
    bars of groups with long names; it knows no points and no bounds."""

    name: str
    title: str
    y_label: str
    series: tuple[Series, ...]
    groups: tuple[str, ...] = ()
    x_label: str = ""
    points: tuple[Series, ...] = ()
    log_x: bool = False
    log_y: bool = False
    sideways: bool = False


def draw(chart: Chart, kind: Format = "svg") -> bytes:
    """The picture. Raises InvalidOption if matplotlib is not installed."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise InvalidOption(f"plots need matplotlib: {install('evals')}") from error
    with rc_context({"svg.hashsalt": chart.name, "svg.fonttype": "none"}):
        buffer = io.BytesIO()
        # without a date, the same rows make the same bytes
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure_of(chart).savefig(buffer, format=kind, metadata=metadata, dpi=110)
    return buffer.getvalue()


def figure_of(chart: Chart) -> Any:
    """The figure of matplotlib, at most `WIDEST` inches wide: a page scales a wider one down, and
    its text with it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    bars = sum(len(series.x) for series in chart.series)
    size = (min(WIDEST, max(6.4, 1.2 + 0.2 * bars)), 4.4) if chart.groups else (6.4, 3.6)
    with rc_context({"font.size": 9}):
        figure = Figure(
            figsize=(WIDEST, 0.9 + 0.22 * bars) if chart.sideways else size, layout="constrained"
        )
        axes = figure.add_subplot()
        if chart.sideways:
            _bars_sideways(axes, chart)
        else:
            (_bars if chart.groups else _lines)(axes, chart)
            axes.set_ylabel(chart.y_label)
            axes.set_xlabel(chart.x_label)
        # a longer line would run into the legend
        axes.set_title(textwrap.fill(chart.title, 56), loc="left", fontsize=10)
        axes.grid(axis="x" if chart.sideways else "y", color="#e2e8f0")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if not chart.sideways or len(chart.series) > 1:
            _legend(figure, below=bool(chart.groups))
        if not chart.sideways:
            _thin_labels(figure, axes)
    return figure


def _legend(figure: Any, *, below: bool) -> None:
    """Beside lines; below bars, which need the width."""
    if not below:
        figure.legend(loc="outside right upper", frameon=False)
        return
    names = [text for axes in figure.axes for text in axes.get_legend_handles_labels()[1]]
    # about 11 characters an inch, and a handle
    columns = int(figure.get_figwidth() * 11 // (max(map(len, names)) + 8))
    figure.legend(loc="outside lower center", ncols=max(1, min(columns, len(names))), frameon=False)


def _thin_labels(figure: Any, axes: Any) -> None:
    """Turns the labels of x where they would touch; drops labels of numbers that still do."""
    figure.draw_without_rendering()
    if not _touching(axes):
        return
    if axes.get_xscale() != "log":
        axes.tick_params(axis="x", labelrotation=35)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
        return
    labels = [label.get_text() for label in axes.get_xticklabels()]
    while pairs := _touching(axes):
        _, right = pairs[-1]
        # the ends stay: they say how far the axis goes
        labels[right - 1 if right == len(labels) - 1 else right] = ""
        axes.set_xticks(axes.get_xticks(), labels)
        figure.draw_without_rendering()


def _touching(axes: Any) -> list[tuple[int, int]]:
    """Pairs of labels of x, neighbours among those with a text, that overlap."""
    labels = [(n, label) for n, label in enumerate(axes.get_xticklabels()) if label.get_text()]
    boxes = [(n, label.get_window_extent()) for n, label in labels]
    return [(a, b) for (a, left), (b, right) in pairwise(boxes) if left.x1 + _LABEL_GAP > right.x0]


def _look_of_bars(number: int) -> dict[str, str]:
    """Colors that come again are hatched."""
    hatch = _HATCHES[number // len(_COLORS) % len(_HATCHES)]
    return {"color": _COLORS[number % len(_COLORS)], "hatch": hatch, "edgecolor": "white"}


def _places(chart: Chart, number: int, x: Sequence[float]) -> list[float]:
    """Where the bars of a series are: side by side in each group, without gaps for series that
    have no bar in it."""
    share = 0.8 / _most_bars(chart)
    places = []
    for group in x:
        own = [n for n, series in enumerate(chart.series) if group in series.x]
        places.append(group + (own.index(number) - (len(own) - 1) / 2) * share)
    return places


def _most_bars(chart: Chart) -> int:
    """Bars of the fullest group."""
    groups = range(len(chart.groups))
    return max(sum(float(group) in series.x for series in chart.series) for group in groups)


def _bars(axes: Any, chart: Chart) -> None:
    """Groups of bars; a series' x is the number of the group."""
    share = 0.8 / _most_bars(chart)
    for number, series in enumerate(chart.series):
        places = _places(chart, number, series.x)
        axes.bar(places, series.y, share * 0.92, label=series.name, lw=0, **_look_of_bars(number))
        _whiskers(axes, places, series, "#1a202c")
        for points in chart.points:
            if points.name == series.name:
                marks = _places(chart, number, points.x)
                axes.plot(marks, points.y, "D", color="#1a202c", markersize=4)
    if chart.points:
        axes.plot([], [], "D", color="#1a202c", markersize=4, label="published")
    axes.set_xticks(range(len(chart.groups)), chart.groups)
    _scale_y(axes, chart)


def _bars_sideways(axes: Any, chart: Chart) -> None:
    """Groups of bars from the top down, each with its number."""
    share = 0.8 / _most_bars(chart)
    for number, series in enumerate(chart.series):
        places = _places(chart, number, series.x)
        look = _look_of_bars(number)
        drawn = axes.barh(places, series.y, share * 0.92, label=series.name, lw=0, **look)
        axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
    axes.set_yticks(range(len(chart.groups)), chart.groups)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlabel(chart.y_label)


def _lines(axes: Any, chart: Chart) -> None:
    colors = {}
    for number, series in enumerate(chart.series):
        color = colors[series.name] = _COLORS[number % len(_COLORS)]
        # colors that come again have another mark
        mark = _MARKS[number // len(_COLORS) % len(_MARKS)]
        x = _beside(chart, number)
        axes.plot(x, series.y, f"{mark}-", label=series.name, color=color, markersize=4)
        _whiskers(axes, x, series, color)
    for number, points in enumerate(chart.points):
        # "X, model" is drawn beside X, and told once
        whose, _, kind = points.name.rpartition(", ")
        if whose in colors:
            axes.plot(points.x, points.y, "--", color=colors[whose], linewidth=1)
            if number == 0:
                axes.plot([], [], "--", label=kind, color="#4a5568", linewidth=1)
            continue
        style = _DASHES[number % len(_DASHES)]
        axes.plot(
            points.x, points.y, linestyle=style, label=points.name, color="#4a5568", linewidth=1
        )
    if chart.log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for series in chart.series for x in series.x})
        axes.set_xticks(ticks, [f"{x:,.0f}" if x >= 1000 else f"{x:g}" for x in ticks])
        axes.minorticks_off()
    _scale_y(axes, chart)


def _beside(chart: Chart, number: int) -> list[float]:
    """The x of a series, moved by part of a percent where series have intervals, which would
    cover one another."""
    own = chart.series[number].x
    every = sorted({x for series in chart.series for x in series.x})
    if len(every) < 2 or not any(series.low for series in chart.series):
        return [*own]
    by = _DODGE * (number - (len(chart.series) - 1) / 2)
    if chart.log_x:
        return [x * (every[-1] / every[0]) ** by for x in own]
    return [x + by * (every[-1] - every[0]) for x in own]


def _scale_y(axes: Any, chart: Chart) -> None:
    """A logarithmic y, its numbers written out."""
    if not chart.log_y:
        return
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log", subs=())
    lowest, highest = axes.get_ylim()
    steps = (1.0, 2.0, 5.0) if highest > _FEW * lowest else tuple(map(float, range(1, 10)))
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter("{x:,g}")


def _whiskers(axes: Any, places: Sequence[float], series: Series, color: str) -> None:
    """Intervals of the values above 0. Where every answer is wrong the interval says how many were
    asked, and the table has it: without a bar it would hang in the air."""
    drawn = [n for n, y in enumerate(series.y) if y > 0]
    if series.low and drawn:
        below = [max(0.0, series.y[n] - series.low[n]) for n in drawn]
        above = [max(0.0, series.high[n] - series.y[n]) for n in drawn]
        errors = [below, above]
        places, values = [places[n] for n in drawn], [series.y[n] for n in drawn]
        axes.errorbar(
            places, values, errors, ecolor=color, linestyle="none", capsize=2, linewidth=1
        )
