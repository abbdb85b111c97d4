"""Plots by matplotlib (extra ``evals``), which is imported at the first plot."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from looseleaf.errors import InvalidOption
from looseleaf_lab.errors import INSTALL
from looseleaf_lab.evals.report.rows import Series

Format = Literal["svg", "png"]
_COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b7791f", "#97266d", "#4a5568", "#319795")
_MARKS = ("o", "^", "s")
_HATCHES = ("", "///", "...")
_WIDE_RANGE = 8
WIDEST = 9.0
"""Maximal width of a plot, in inches."""
_DODGE = 0.006
# minimal gap between two tick labels, in pixels
_LABEL_GAP = 4
_DASHES = ("--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)))


@dataclass(frozen=True)
class Chart:
    """One plot: bars over named groups if ``groups`` are given, else lines over numbers.

    ``points`` are published figures: marks on bars, dashed lines among lines. ``sideways`` is for
    groups with long names; it supports neither points nor intervals."""

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
    """The plot as a file's content. Raises InvalidOption if matplotlib is not installed."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise InvalidOption(f"plots need matplotlib: {INSTALL}") from error
    with rc_context({"svg.hashsalt": chart.name, "svg.fonttype": "none"}):
        buffer = io.BytesIO()
        # without a date, equal rows give equal bytes
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure_of(chart).savefig(buffer, format=kind, metadata=metadata, dpi=110)
    return buffer.getvalue()


def figure_of(chart: Chart) -> Any:
    """The matplotlib figure, at most `WIDEST` inches wide: a page would scale a wider one down,
    text included."""
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
        # a longer line would overlap the legend
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
    """A legend right of lines, or below bars, which need the width."""
    if not below:
        figure.legend(loc="outside right upper", frameon=False)
        return
    names = [text for axes in figure.axes for text in axes.get_legend_handles_labels()[1]]
    # about 11 characters per inch, and a handle
    columns = int(figure.get_figwidth() * 11 // (max(map(len, names)) + 8))
    figure.legend(loc="outside lower center", ncols=max(1, min(columns, len(names))), frameon=False)


def _thin_labels(figure: Any, axes: Any) -> None:
    """Rotate x labels that would touch; on a logarithmic axis, drop some of them."""
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
        _, later = pairs[-1]
        # the end labels stay, because they show the range
        labels[later - 1 if later == len(labels) - 1 else later] = ""
        axes.set_xticks(axes.get_xticks(), labels)
        figure.draw_without_rendering()


def _touching(axes: Any) -> list[tuple[int, int]]:
    """Pairs of adjacent x labels that overlap; empty labels do not count."""
    labels = [(n, label) for n, label in enumerate(axes.get_xticklabels()) if label.get_text()]
    boxes = [(n, label.get_window_extent()) for n, label in labels]
    return [
        (a, b) for (a, box), (b, next_box) in pairwise(boxes) if box.x1 + _LABEL_GAP > next_box.x0
    ]


def _bar_style(number: int) -> dict[str, str]:
    """Color and hatch of a series; repeated colors have hatches."""
    hatch = _HATCHES[number // len(_COLORS) % len(_HATCHES)]
    return {"color": _COLORS[number % len(_COLORS)], "hatch": hatch, "edgecolor": "white"}


def _bar_positions(chart: Chart, number: int, x: Sequence[float]) -> list[float]:
    """Positions of a series' bars: side by side in each group, without gaps for series that have no
    bar in it."""
    width = 0.8 / _most_bars(chart)
    positions = []
    for group in x:
        series_in_group = [n for n, series in enumerate(chart.series) if group in series.x]
        positions.append(
            group + (series_in_group.index(number) - (len(series_in_group) - 1) / 2) * width
        )
    return positions


def _most_bars(chart: Chart) -> int:
    """Number of bars in the fullest group."""
    groups = range(len(chart.groups))
    return max(sum(float(group) in series.x for series in chart.series) for group in groups)


def _bars(axes: Any, chart: Chart) -> None:
    """Groups of bars; a series' x is the number of the group."""
    width = 0.8 / _most_bars(chart)
    for number, series in enumerate(chart.series):
        positions = _bar_positions(chart, number, series.x)
        axes.bar(positions, series.y, width * 0.92, label=series.name, lw=0, **_bar_style(number))
        _whiskers(axes, positions, series, "#1a202c")
        for points in chart.points:
            if points.name == series.name:
                marks = _bar_positions(chart, number, points.x)
                axes.plot(marks, points.y, "D", color="#1a202c", markersize=4)
    if chart.points:
        axes.plot([], [], "D", color="#1a202c", markersize=4, label="published")
    axes.set_xticks(range(len(chart.groups)), chart.groups)
    _scale_y(axes, chart)


def _bars_sideways(axes: Any, chart: Chart) -> None:
    """Groups of horizontal bars from the top down, each with its value."""
    width = 0.8 / _most_bars(chart)
    for number, series in enumerate(chart.series):
        positions = _bar_positions(chart, number, series.x)
        style = _bar_style(number)
        bars_drawn = axes.barh(positions, series.y, width * 0.92, label=series.name, lw=0, **style)
        axes.bar_label(bars_drawn, fmt="%.3g", padding=3, fontsize=8)
    axes.set_yticks(range(len(chart.groups)), chart.groups)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlabel(chart.y_label)


def _lines(axes: Any, chart: Chart) -> None:
    colors = {}
    for number, series in enumerate(chart.series):
        color = colors[series.name] = _COLORS[number % len(_COLORS)]
        # repeated colors have another mark
        mark = _MARKS[number // len(_COLORS) % len(_MARKS)]
        x = _offset_x(chart, number)
        axes.plot(x, series.y, f"{mark}-", label=series.name, color=color, markersize=4)
        _whiskers(axes, x, series, color)
    for number, points in enumerate(chart.points):
        # "X, model" shares the color of X, and one legend entry
        series_name, _, kind = points.name.rpartition(", ")
        if series_name in colors:
            axes.plot(points.x, points.y, "--", color=colors[series_name], linewidth=1)
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


def _offset_x(chart: Chart, number: int) -> list[float]:
    """The x of a series, shifted by part of a percent if series have intervals, so that these do
    not overlap."""
    x_values = chart.series[number].x
    all_x = sorted({x for series in chart.series for x in series.x})
    if len(all_x) < 2 or not any(series.low for series in chart.series):
        return [*x_values]
    shift = _DODGE * (number - (len(chart.series) - 1) / 2)
    if chart.log_x:
        return [x * (all_x[-1] / all_x[0]) ** shift for x in x_values]
    return [x + shift * (all_x[-1] - all_x[0]) for x in x_values]


def _scale_y(axes: Any, chart: Chart) -> None:
    """Set a logarithmic y axis with plain numbers."""
    if not chart.log_y:
        return
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log", subs=())
    lowest, highest = axes.get_ylim()
    steps = (1.0, 2.0, 5.0) if highest > _WIDE_RANGE * lowest else tuple(map(float, range(1, 10)))
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter("{x:,g}")


def _whiskers(axes: Any, positions: Sequence[float], series: Series, color: str) -> None:
    """Draw the intervals of values above 0. At a value of 0 there is no bar, so its interval would
    float; the table has it."""
    positive = [n for n, y in enumerate(series.y) if y > 0]
    if series.low and positive:
        below = [max(0.0, series.y[n] - series.low[n]) for n in positive]
        above = [max(0.0, series.high[n] - series.y[n]) for n in positive]
        errors = [below, above]
        positions, values = [positions[n] for n in positive], [series.y[n] for n in positive]
        axes.errorbar(
            positions, values, errors, ecolor=color, linestyle="none", capsize=2, linewidth=1
        )
