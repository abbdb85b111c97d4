"""Plots by matplotlib (extra ``evals``), imported when one is drawn."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from looseleaf.errors import InvalidOption, install
from looseleaf.evals.report.rows import Series

Format = Literal["svg", "png"]
_COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b7791f", "#97266d", "#4a5568", "#319795")
_MARKS = ("o", "^", "s")
_HATCHES = ("", "///", "...")
_DECADES = 20
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
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidOption(f"plots need matplotlib: {install('evals')}") from error
    width = max(6.4, 1.6 + 0.28 * len(chart.groups) * len(chart.series))
    settings = {"svg.hashsalt": chart.name, "font.size": 9, "svg.fonttype": "none"}
    with rc_context(settings):
        bars = len(chart.groups) * len(chart.series)
        size = (9.0, 0.9 + 0.22 * bars) if chart.sideways else (min(width, 14), 3.6)
        figure = Figure(figsize=size, layout="constrained")
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
            figure.legend(loc="outside right upper", frameon=False)
        buffer = io.BytesIO()
        # without a date, the same rows make the same bytes
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, metadata=metadata, dpi=110)
    return buffer.getvalue()


def _look_of_bars(number: int) -> dict[str, str]:
    """Colors that come again are hatched."""
    hatch = _HATCHES[number // len(_COLORS) % len(_HATCHES)]
    return {"color": _COLORS[number % len(_COLORS)], "hatch": hatch, "edgecolor": "white"}


def _bars(axes: Any, chart: Chart) -> None:
    """Groups of bars; a series' x is the number of the group."""
    share = 0.8 / len(chart.series)
    for number, series in enumerate(chart.series):
        places = [x + (number - (len(chart.series) - 1) / 2) * share for x in series.x]
        axes.bar(places, series.y, share * 0.92, label=series.name, lw=0, **_look_of_bars(number))
        _whiskers(axes, places, series, "#1a202c")
        for points in chart.points:
            if points.name == series.name:
                marks = [x + (number - (len(chart.series) - 1) / 2) * share for x in points.x]
                axes.plot(marks, points.y, "D", color="#1a202c", markersize=4)
    if chart.points:
        axes.plot([], [], "D", color="#1a202c", markersize=4, label="published")
    axes.set_xticks(range(len(chart.groups)), chart.groups, rotation=20, ha="right")
    if chart.log_y:
        axes.set_yscale("log")


def _bars_sideways(axes: Any, chart: Chart) -> None:
    """Groups of bars from the top down, each with its number."""
    share = 0.8 / len(chart.series)
    for number, series in enumerate(chart.series):
        places = [x + (number - (len(chart.series) - 1) / 2) * share for x in series.x]
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
        axes.plot(series.x, series.y, f"{mark}-", label=series.name, color=color, markersize=4)
        _whiskers(axes, series.x, series, color)
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
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        lowest, highest = axes.get_ylim()
        # few powers of ten are to be seen: what lies between them is named too
        axes.yaxis.set_minor_formatter("{x:g}" if highest < _DECADES * lowest else "")


def _whiskers(axes: Any, places: Sequence[float], series: Series, color: str) -> None:
    if series.low:
        below = [max(0.0, y - low) for y, low in zip(series.y, series.low, strict=True)]
        above = [max(0.0, high - y) for y, high in zip(series.y, series.high, strict=True)]
        errors = [below, above]
        axes.errorbar(
            places, series.y, errors, ecolor=color, linestyle="none", capsize=2, linewidth=1
        )
