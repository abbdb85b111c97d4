"""The report shows what the rows say, the newest of each kind, and draws the same bytes twice."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench import hits, relay
from looseleaf_lab.bench.results import append_rows
from looseleaf_lab.evals.figures import Figure
from looseleaf_lab.evals.report import speed, write_report
from looseleaf_lab.evals.report.charts import Chart, draw
from looseleaf_lab.evals.report.quality import quality_charts, quality_table
from looseleaf_lab.evals.report.reading import reading_charts, reading_tables
from looseleaf_lab.evals.report.rows import Series, policy_of, read_rows
from looseleaf_lab.evals.report.sharing import hits_charts, lazy_charts, rate_charts, relay_charts

ORIGIN = {
    "date": "2026-11-21", "commit": "abc", "hardware": "a <machine>", "python_version": "3",
    "torch_version": "2", "transformers_version": "5",
}  # fmt: skip


def _figure(value: float, arm: str = "full attention", setting: str = "6 documents") -> Figure:
    return Figure("causal", "lookup", setting, arm, "0-9", "exact", 10, value, value - 0.1, value)


def _write(folder: Path, figures: Sequence[Figure]) -> Path:
    path = folder / "evals.csv"
    for figure in figures:
        append_rows(path, [asdict(figure)], ORIGIN)
    return path


def test_of_rows_that_measure_the_same_the_newest_counts(tmp_path: Path) -> None:
    path = _write(tmp_path, [_figure(0.5), _figure(0.7, "documents reused"), _figure(0.6)])
    rows = read_rows(path)
    assert [(row["arm"], row["value"]) for row in rows] == [
        ("documents reused", "0.7"),
        ("full attention", "0.6"),
    ]


def test_a_table_has_a_line_a_task_and_a_column_an_arm(tmp_path: Path) -> None:
    figures = [_figure(0.5), _figure(0.25, "documents reused"), _figure(1.0, setting="2 | 3")]
    table = quality_table(read_rows(_write(tmp_path, figures)))
    assert table.columns[2:] == ("causal, full attention", "causal, documents reused")
    assert table.lines[0][2:] == ("50.0 (40.0 to 50.0; 10)", "25.0 (15.0 to 25.0; 10)")
    assert table.lines[1] == ("lookup", "2 | 3", "100.0 (90.0 to 100.0; 10)", "")
    assert "2 / 3" in table.markdown() and "<td>2 | 3</td>" in table.html()


def test_figures_about_how_an_arm_answered_are_no_right_answers(tmp_path: Path) -> None:
    other = Figure("causal", "lookup", "6 documents", "links", "0-9", "share", 10, 0.1, 0.1, 0.1)
    table = quality_table(read_rows(_write(tmp_path, [_figure(0.5), other])))
    assert table.columns[2:] == ("causal, full attention",)


def test_lengths_and_budgets_are_drawn_as_lines(tmp_path: Path) -> None:
    figures = [_figure(0.9, setting=f"{tokens} tokens") for tokens in (512, 256)]
    figures += [_figure(0.1 * n, f"links, ratio 0.{n}") for n in (1, 2)] + [_figure(0.9)]
    charts = {c.name: c for c in quality_charts(read_rows(_write(tmp_path, figures)))}
    lengths = charts["lengths_causal_lookup"]
    assert lengths.series[0].x == (256.0, 512.0) and not lengths.groups
    budgets = charts["budgets_causal_lookup_6_documents"]
    assert (budgets.series[0].name, budgets.series[0].x) == ("links", (0.1, 0.2))
    assert budgets.series[0].y == pytest.approx((10.0, 20.0))
    assert [points.name for points in budgets.points] == ["full attention"]


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("links, ratio 0.15", ("links", 0.15)),
        ("first, tokens 16", ("first", 16.0)),
        ("quest, budget 0.1, w 4", ("quest, w 4", 0.1)),
        ("full attention", None),
    ],
)
def test_an_arms_budget_is_read_from_its_name(arm: str, expected: object) -> None:
    assert policy_of({"arm": arm}) == expected


def test_hits_are_drawn_with_the_published_figures_as_marks(tmp_path: Path) -> None:
    config = hits.HitsConfig(documents=30, document_tokens=64, requests=20, skipped=4)
    append_rows(tmp_path / "hits.csv", list(hits.measure(config, (1.0,), (2.1,))), ORIGIN)
    (chart,) = hits_charts(read_rows(tmp_path / "hits.csv"))
    assert chart.groups == ("α 2.1, 1 GB",)
    assert {points.name: points.y for points in chart.points}["stored once"] == (13.57,)
    assert len(chart.series) == 4


def test_relay_is_drawn_beside_its_model(tmp_path: Path) -> None:
    rows = []
    for prefix in (512, 64):
        for arm, faster in (("relay", 1.0), ("private copies", prefix / 100)):
            rows.append(
                {
                    "measurement": "decode attention", "model": "m", "prefix": prefix, "batch": 4,
                    "arm": arm, "median": 1.0, "relay_faster": faster,
                    "predicted": relay.predicted(prefix, 128, 4),
                }
            )  # fmt: skip
    append_rows(tmp_path / "relay.csv", rows, ORIGIN)
    (chart,) = relay_charts(read_rows(tmp_path / "relay.csv"))
    assert chart.series == (Series("4 rows", (64.0, 512.0), (0.64, 5.12)),)
    assert chart.points[0].y == pytest.approx(
        (relay.predicted(64, 128, 4), relay.predicted(512, 128, 4)), rel=1e-3
    )


def test_machines_are_drawn_apart_and_first_tokens_over_rates(tmp_path: Path) -> None:
    machines = (("A CPU, 1 threads", "CPU time", ("full",)), ("A card", "wall", ("full", "reuse")))
    for machine, clock, arms in machines:
        rows = [
            {
                "measurement": "first token",
                "model": "m",
                "arm": arm,
                "rate": rate,
                "clock": clock,
                "value": 5.0 * rate,
            }
            for arm in arms
            for rate in (4.0, 2.0)
        ]
        append_rows(tmp_path / "rate.csv", rows, ORIGIN | {"hardware": machine})
    charts = list(rate_charts(read_rows(tmp_path / "rate.csv")))
    assert [chart.name for chart in charts] == ["rate_a_cpu", "rate_a_card"]
    assert charts[1].series[1] == Series("reuse", (2.0, 4.0), (10.0, 20.0))


def test_rates_of_an_arm_are_those_of_its_newest_run(tmp_path: Path) -> None:
    """It may end sooner than the run before, whose last rates say nothing beside it."""
    for commit, rates in (("old", (2.0, 4.0, 8.0)), ("new", (2.0, 4.0))):
        rows = [
            {
                "model": "m", "measurement": "first token", "per_request": 6,
                "document_tokens": 512, "arm": "reuse", "rate": rate, "value": 5.0,
                "requests": 20 if commit == "old" else 40,
            }
            for rate in rates
        ]  # fmt: skip
        append_rows(tmp_path / "rate.csv", rows, ORIGIN | {"commit": commit})
    (chart,) = rate_charts(read_rows(tmp_path / "rate.csv"))
    assert [series.x for series in chart.series] == [(2.0, 4.0)]


def test_first_tokens_are_drawn_by_documents_and_their_tokens(tmp_path: Path) -> None:
    cells = (
        ("first token alone", 6, 128),
        ("first token alone", 3, 128),
        ("first token, 2 at once", 6, 128),
    )
    rows = [
        {"measurement": what, "model": "m", "arm": "reuse", "per_request": number,
         "document_tokens": tokens, "requests": repetitions, "value": repetitions + number}
        for repetitions in (5.0, 1.0)
        for what, number, tokens in cells
    ]  # fmt: skip
    append_rows(tmp_path / "rate.csv", rows, ORIGIN)
    (chart,) = rate_charts(read_rows(tmp_path / "rate.csv"))
    assert chart.groups == ("3 × 128", "6 × 128", "6 × 128, 2 at once")
    assert chart.series == (Series("reuse", (0.0, 1.0, 2.0), (4.0, 7.0, 7.0)),)


def test_what_frames_cost_is_of_two_arms_of_one_run(tmp_path: Path) -> None:
    for commit, case, arm, median in (
        ("abc", "decode", "looseleaf", 11.0), ("abc", "decode", "without frames", 10.0),
        ("abc", "decode", "ungrouped", 30.0), ("abc", "prefill", "without frames", 10.0),
        ("abd", "prefill", "looseleaf", 50.0),
    ):  # fmt: skip
        row: dict[str, str | float] = {"measurement": case, "arm": arm, "median": median}
        append_rows(tmp_path / "attention.csv", [row], ORIGIN | {"commit": commit})
    (chart,) = speed.frames_charts(read_rows(tmp_path / "attention.csv"))
    assert chart.groups == ("decode",) and chart.series[0].y == pytest.approx((10.0,))
    assert draw(chart).count(b"<svg") == 1


def test_the_closed_form_is_drawn_beside_what_was_measured(tmp_path: Path) -> None:
    config = hits.HitsConfig(documents=30, document_tokens=64, requests=20, skipped=4)
    wide = list(hits.measure(replace(config, per_request=20), (1.0,), (0.853,)))
    append_rows(tmp_path / "hits.csv", wide, ORIGIN)
    (chart,) = hits_charts(read_rows(tmp_path / "hits.csv"))
    assert chart.groups == ("stored once", "copy per position")
    closed, measured = (series.y for series in chart.series)
    once, copies = (row for row in wide if row["closed_form"] != "")
    assert measured[0] == pytest.approx(100 * float(once["reused"]), rel=1e-3)
    assert closed[1] == pytest.approx(100 * float(copies["closed_form"]), rel=1e-3)


def test_what_is_cached_is_drawn_stage_by_stage(tmp_path: Path) -> None:
    rows = [
        {
            "model": "m", "measurement": f"breakdown, {cached}: {stage}", "arm": "once",
            "per_request": 5, "document_tokens": 64, "value": value,
        }
        for cached, value in (("none cached", 9.0), ("3 cached", 4.0))
        for stage in ("first token", "a token of output")
    ]  # fmt: skip
    append_rows(tmp_path / "lazy.csv", rows, ORIGIN)
    (chart,) = lazy_charts(read_rows(tmp_path / "lazy.csv"))
    assert chart.groups == ("none cached", "3 cached")
    assert [series.name for series in chart.series] == ["first token", "a token of output"]
    assert chart.series[0].y == (9.0, 4.0)


def test_hosted_tokens_are_drawn_over_contexts_and_depths_apart(tmp_path: Path) -> None:
    rows = [
        {"shape": "m", "layers": layers, "context": n, "arm": "graph", "token_ms": layers * 1.0}
        for layers, contexts in ((32, (32, 16)), (2, (100,)))
        for n in contexts
    ]  # fmt: skip
    append_rows(tmp_path / "hosted.csv", rows, ORIGIN)
    deep, flat = speed.hosted_charts(read_rows(tmp_path / "hosted.csv"))
    assert deep.series == (Series("graph", (16.0, 32.0), (32.0, 32.0)),)
    assert flat.series == (Series("graph", (100.0,), (2.0,)),)


def test_of_a_rate_that_was_sought_twice_the_newest_is_drawn(tmp_path: Path) -> None:
    rows = [
        {
            "measurement": f"rate at {limit}",
            "model": "m",
            "prefix": 64,
            "arm": "relay",
            "median": median,
        }
        for limit, median in (("9 ms a token", 1.0), ("3 times the latency of one", 2.0))
    ]
    append_rows(tmp_path / "relay.csv", rows, ORIGIN)
    (chart,) = relay_charts(read_rows(tmp_path / "relay.csv"))
    assert chart.series == (Series("relay", (0.0,), (2.0,)),)


def test_the_page_holds_plots_tables_and_origin_and_is_the_same_each_time(tmp_path: Path) -> None:
    _write(tmp_path, [_figure(0.5), _figure(0.25, "documents reused")])
    paths = write_report(tmp_path, tmp_path / "one")
    page = (tmp_path / "one" / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1 and "50.0 (40.0 to 50.0; 10)" in page
    assert "a &lt;machine&gt;; 2026-11-21; commit abc." in page and "<script" not in page
    assert all(path.stat().st_size > 0 for path in paths)
    write_report(tmp_path, tmp_path / "two")
    for path in paths:
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_a_model_is_drawn_beside_each_of_its_lines_and_told_once() -> None:
    lines = tuple(Series(f"{n} rows", (1.0, 2.0), (n, n)) for n in (1.0, 2.0))
    models = tuple(replace(line, name=f"{line.name}, model") for line in lines)
    other = Series("published", (1.0,), (1.0,))
    page = draw(Chart("a", "t", "y", lines, points=(*models, other))).decode()
    assert [page.count(f">{name}</text>") for name in ("model", "2.0 rows", "published")] == [1] * 3
    assert "2.0 rows, model" not in page


@pytest.mark.parametrize("sideways", [False, True])
def test_bars_whose_color_comes_again_are_hatched(sideways: bool) -> None:
    def hatches(count: int) -> int:
        series = tuple(Series(f"series {n}", (0.0,), (1.0 + n,)) for n in range(count))
        chart = Chart("a", "t", "y", series, groups=("g",), sideways=sideways)
        return draw(chart).count(b"<pattern")

    # one for the ninth, and one for what comes a third time
    assert [hatches(count) for count in (8, 9, 17)] == [0, 1, 9]


def test_pictures_come_as_png_too() -> None:
    chart = Chart("a", "t", "y", (Series("s", (0.0, 1.0), (1.0, 2.0), (0.5, 1.5), (1.5, 2.5)),))
    assert draw(chart, "png").startswith(b"\x89PNG")


def test_without_rows_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"has none of evals\.csv"):
        write_report(tmp_path, tmp_path / "out")


def test_the_rows_of_this_repository_can_be_drawn(tmp_path: Path) -> None:
    results = Path(__file__).parents[3] / "results"
    paths = write_report(results, tmp_path / "out")
    assert len(paths) > 3
    with (results / "evals.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            low, value, high = (float(row[name]) for name in ("low", "value", "high"))
            # rows have four digits
            assert low - 1e-3 <= value <= high + 1e-3


def test_a_larger_sample_is_not_replaced_by_a_smaller_one(tmp_path: Path) -> None:
    path = _write(tmp_path, [_figure(0.5), replace(_figure(0.9), items=2, seeds="0-1")])
    assert [row["value"] for row in read_rows(path)] == ["0.5"]
    append_rows(path, [asdict(replace(_figure(0.6), items=20, seeds="0-19"))], ORIGIN)
    assert [row["value"] for row in read_rows(path)] == ["0.6"]


def test_long_outputs_have_a_chart_of_policies_one_of_revision_and_one_of_exposure(
    tmp_path: Path,
) -> None:
    arms = ("full attention", "window, ratio 0.05", "quest, ratio 0.05", "quest, ratio 0.1")
    revised = ("quest, ratio 0.05, revise 2", "quest, ratio 0.05, revise 8")
    figures = [_figure(n / 10, arm) for n, arm in enumerate((*arms, *revised))]
    figures += [
        replace(_figure(1 + later / 10, arm), metric=f"exposure_{later}")
        for arm in revised
        for later in (1, 2)
    ]
    rows = read_rows(_write(tmp_path, figures))
    select, revise, exposure = reading_charts(rows)
    assert [one.name for one in select.series] == ["window", "quest"]
    assert select.series[1].x == (5.0, 10.0) and select.series[1].y == (20.0, 30.0)
    assert [one.name for one in revise.series] == ["quest", "quest, revise 2", "quest, revise 8"]
    assert [(one.name, one.y) for one in select.points] == [("full attention", (0.0, 0.0))]
    assert [(one.name, one.x, one.y) for one in exposure.series] == [
        ("5 %, revise 8", (1.0, 2.0), (1.1, 1.2))
    ]
    table, seen = reading_tables(rows)
    assert table.columns == ("reads", "5 %", "10 %")
    assert [line[0] for line in table.lines] == [
        "full attention", "window", "quest", "quest, revise 2", "quest, revise 8",
    ]  # fmt: skip
    assert table.lines[1][2] == "" and table.lines[2][1].startswith("20.0 (")
    every = "quest, ratio 0.05, every layer, revise 8"
    more = [*figures, _figure(0.3, every), replace(_figure(1.3, every), metric="exposure_1")]
    _, both = reading_tables(read_rows(_write(tmp_path / "more", more)))
    assert both.lines == (*seen.lines, ("5 %, every layer, revise 8", "1.30", ""))
    assert seen.columns == ("later rows", "1", "2")
    assert seen.lines == (
        ("published", "1.17", ""),
        ("5 %, revise 2", "1.10", "1.20"),
        ("5 %, revise 8", "1.10", "1.20"),
    )


def test_times_are_drawn_by_tier_policy_and_context_and_listed_by_case(tmp_path: Path) -> None:
    def charts_of(name: str, rows: list[dict[str, Any]], charts: Any) -> list[Any]:
        append_rows(tmp_path / f"{name}.csv", rows, ORIGIN)
        return list(charts(read_rows(tmp_path / f"{name}.csv")))

    tiers = [
        {"model": "m", "tier": tier, "arm": arm, "ratio": ratio, "seconds": ratio}
        for tier in ("fast", "disk")
        for arm, ratio in (("sweep", 0.15), ("sweep", 0.4), ("controller", 0.2))
    ]
    (chart,) = charts_of("tiers", tiers, speed.tiers_charts)
    assert [s.name for s in chart.series] == ["controller", "15%", "40%"]
    assert chart.series[2] == Series("40%", (0.0, 1.0), (400.0, 400.0))
    shaped = [row | {"model": "small, random"} for row in tiers[:3]]
    names = [chart.name for chart in charts_of("tiers", shaped, speed.tiers_charts)]
    assert names[1] == f"{names[0]}_small"
    fuse = [
        {"model": "m", "documents": 5, "document_tokens": 64, "measurement": what, "arm": "reuse",
         "place": "host", "ratio": 0.0, "batch": batch, "ms": 3.0}
        for what, batch in (("first token", 0), ("batch of 2", 0), ("batch of 2", 1))
    ]  # fmt: skip
    first, batches = charts_of("fuse", fuse, speed.fuse_charts)
    assert first.groups == ("host",)
    assert batches.series == (Series("reuse", (0.0, 1.0), (3.0, 3.0)),)
    shares = [
        fuse[0] | {"arm": arm, "ratio": ratio, "ms": 100 * ratio + 1}
        for arm, ratio in (("full", 0.0), ("random", 0.05), ("random", 0.15), ("random", 0.18))
    ]
    bars, shares = charts_of("shares", shares, speed.fuse_charts)
    # what is compared in bars is of one share
    assert [(s.name, s.y) for s in bars.series] == [("full", (1.0,)), ("random", (16.0,))]
    assert shares.series == (Series("random, host", (5.0, 15.0, 18.0), (6.0, 16.0, 19.0)),)
    assert shares.points == (Series("full", (5.0, 18.0), (1.0, 1.0)),)
    select = [
        {"what": "token", "shape": "s", "select": "quest", "context": context, "batch": 1,
         "arm": arm, "ms": context / 100 + more, "mb": 2000.0}
        for context in (2000, 1000)
        # an adaptive window is one arm, by whatever it fell to, and the newest row counts
        for more, arm in ((9, "w<=8"), (3, f"w<=8 is {context // 500}"), (0, "dense"),
                          (1, "left alone"), (2, "select"))
    ]  # fmt: skip
    read, chart = charts_of("select", select, speed.select_charts)
    arms = "dense", "chosen", "w ≤ 8, adaptive"
    assert read.series == tuple(Series(arm, (0.0, 1.0), (2.0, 2.0)) for arm in arms)
    assert read.groups == ("1 × 1,000", "1 × 2,000")
    assert [(s.name, s.x, s.y) for s in chart.series] == [
        (arm, (1000.0, 2000.0), (10.0 + more, 20.0 + more))
        for arm, more in zip((*arms, "left to the engine"), (0, 2, 3, 1), strict=True)
    ]
    attention = [
        {"measurement": "decode", "arm": arm, "median": 2.0, "share_of_roofline": 0.5}
        for arm in ("looseleaf", "peer")
    ]
    (table,) = charts_of("attention", attention, speed.attention_tables)
    assert table.lines == (("decode", "2.0 (50%)", "2.0 (50%)"),)
