"""Pictures can be read: labels apart, bars in a known order, no interval without its value."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from looseleaf_lab.bench.index_plot import draw as draw_index
from looseleaf_lab.evals.report.charts import WIDEST, Chart, figure_of
from looseleaf_lab.evals.report.rows import Series
from looseleaf_lab.evals.report.sharing import rate_charts
from looseleaf_lab.evals.report.speed import tiers_charts

pytest.importorskip("matplotlib")


def _boxes(figure: Any) -> list[Any]:
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    return [label.get_window_extent() for label in labels]


@pytest.mark.parametrize(
    "lengths", [(1024, 4096, 8192, 12288, 16384), (1, 2, 3, 4, 5, 6, 7, 8), (2, 4, 6, 8, 128)]
)
def test_labels_of_lengths_do_not_touch_and_the_ends_stay(lengths: tuple[float, ...]) -> None:
    line = Series("full", tuple(lengths), tuple(float(n) for n in range(len(lengths))))
    figure = figure_of(Chart("c", "title", "right, %", (line,), log_x=True))
    boxes = _boxes(figure)
    assert all(a.x1 < b.x0 for a, b in pairwise(boxes))
    ticks = figure.axes[0].get_xticklabels()
    assert ticks[0].get_text() and ticks[-1].get_text()


def test_long_names_of_groups_are_turned_and_short_ones_are_not() -> None:
    series = (Series("arm", (0.0, 1.0, 2.0), (1.0, 2.0, 3.0)),)
    angles = []
    for word in ("fast", "a roll-call of 12 lines, 16 documents"):
        figure = figure_of(Chart("c", "title", "ms", series, (word,) * 3))
        figure.draw_without_rendering()
        angles.append(figure.axes[0].get_xticklabels()[0].get_rotation())
    assert angles == [0, 35]


def test_many_bars_do_not_make_a_picture_wider_than_a_page() -> None:
    x = tuple(map(float, range(12)))
    series = tuple(Series(f"arm {n}", x, x) for n in range(8))
    figure = figure_of(Chart("c", "title", "ms", series, tuple(f"group {n}" for n in range(12))))
    assert figure.get_figwidth() == WIDEST


@pytest.mark.parametrize("groups", [(), ("a", "b")])
def test_a_value_of_nothing_has_no_interval(groups: tuple[str, ...]) -> None:
    series = Series("arm", (0.0, 1.0), (0.0, 50.0), low=(0.0, 40.0), high=(32.0, 60.0))
    figure = figure_of(Chart("c", "title", "right, %", (series,), groups))
    (bars,) = figure.axes[0].containers[-1:]
    (segments,) = (part.get_segments() for part in bars.lines[2])
    assert len(segments) == 1
    assert [y for _, y in segments[0]] == [40.0, 60.0]


def test_a_group_of_one_bar_has_it_in_the_middle() -> None:
    both = Series("both", (0.0, 1.0), (1.0, 1.0))
    figure = figure_of(Chart("c", "t", "ms", (both, Series("one", (0.0,), (1.0,))), ("a", "b")))
    middles = {bar.get_x() + bar.get_width() / 2 for bar in figure.axes[0].patches}
    assert any(abs(middle - 1.0) < 1e-9 for middle in middles)


def test_tiers_are_drawn_from_fast_to_slow_and_shares_from_small_to_large() -> None:
    arms = (("computed", "1"), ("sweep", "0.6"), ("sweep", "0.15"), ("controller", "0.2"))
    rows = [
        {"model": "m", "hardware": "h", "tier": tier, "arm": arm, "ratio": ratio, "seconds": "1"}
        for tier in ("all", "slow", "remote", "fast", "disk", "medium")
        for arm, ratio in arms
    ]
    (chart,) = tiers_charts(rows)
    assert chart.groups == ("fast", "medium", "slow", "disk", "remote", "all")
    assert [series.name for series in chart.series] == ["controller", "15%", "60%", "computed"]


def test_sizes_are_drawn_from_few_and_short_documents_to_many_at_once() -> None:
    rows = [
        {
            "measurement": f"first token{when}", "per_request": number, "document_tokens": length,
            "arm": "full", "value": "1", "model": "m", "hardware": "h", "rate": "0", "commit": "c",
        }
        for number, length, when in (
            ("6", "128", ", 8 at once"), ("12", "128", " alone"), ("6", "64", " alone"),
            ("6", "128", ", 2 at once"), ("3", "128", " alone"),
        )
    ]  # fmt: skip
    charts = {chart.name.split("_")[1]: chart for chart in rate_charts(rows)}
    assert charts["sizes"].groups == (
        "6 × 64", "3 × 128", "12 × 128", "6 × 128, 2 at once", "6 × 128, 8 at once",
    )  # fmt: skip


def test_an_index_that_finds_nothing_is_a_line_of_text_and_no_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    rows: list[dict[str, str | int | float]] = [
        {"layer": "l", "keys": 8, "index": "flat", "effort": 0, "scanned": 1.0, "recall": 1.0},
        {"layer": "l", "keys": 8, "index": "lost", "effort": 1, "scanned": 0.0, "recall": 0.0},
    ]
    draw_index(rows, tmp_path / "index.png")
    (panel,) = drawn[0].axes
    points = [y for line in panel.lines[:2] for y in line.get_ydata()]
    assert points == [1.0]
    assert [text.get_text() for text in panel.texts] == ["lost: recall 0.00"]
