"""Charts and tables of ``roll_call.csv`` and ``interview.csv``: long outputs by the keys that each
token reads."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from looseleaf_lab.evals.report.charts import Chart
from looseleaf_lab.evals.report.rows import Row, Series, main_rows, policy_of, series_of
from looseleaf_lab.evals.report.tables import Table, percent_of

_SHARE = "right, %"
_BUDGET = "keys read, % of the context"
_REVISED = ", revise "
_STALE = ", stale"
# RetroAttention (arXiv 2508.09001): with one and with seven later rows
_PUBLISHED = Series("published", (1.0, 7.0), (1.17, 1.60))

_Points = Mapping[str, Sequence[tuple[float, Row]]]
_Exposure = Mapping[str, Mapping[int, float]]


def reading_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Per model and task: policies by budget, revision by budget, exposure by later rows."""
    for (model, task, setting), output_rows in _outputs(rows).items():
        title = f"{model}: {task}, {setting}"
        name = f"{model}_{task}_{setting}".replace(" ", "_").replace(",", "")
        policies = _policies(output_rows)
        unrevised = {key: points for key, points in policies.items() if _REVISED not in key}
        if unrevised:
            yield _budgets(f"select_{name}", title, unrevised, output_rows)
        revised = {
            key: points
            for key, points in policies.items()
            if key.split(_REVISED)[0] in {k.split(_REVISED)[0] for k in policies if _REVISED in k}
        }
        if revised:
            yield _budgets(f"revise_{name}", title, revised, output_rows)
        if exposure := tuple(_widest(_exposure(output_rows))):
            yield Chart(
                f"exposure_{name}",
                title,
                "pages seen, over those of a row's own step",
                exposure,
                x_label="later rows",
                points=(_PUBLISHED,),
            )


def reading_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Per model and task: a line per policy and a column per budget, and the effective exposure of
    revised rows by later rows."""
    for (model, task, setting), output_rows in _outputs(rows).items():
        policies = _policies(output_rows)
        budgets = sorted({budget for points in policies.values() for budget, _ in points})
        lines = [
            (row["arm"], *([percent_of(row)] * len(budgets)))
            for row in main_rows(output_rows)
            if policy_of(row) is None
        ]
        for name, points in policies.items():
            cells = dict(points)
            cells_of_policy = (cells.get(budget) for budget in budgets)
            lines.append((name, *(percent_of(row) if row else "" for row in cells_of_policy)))
        title = f"{model}: {task}, {setting}: right answers, percent (95 % interval; outputs)"
        heads = (f"{100 * budget:g} %" for budget in budgets)
        yield Table(title, ("reads", *heads), tuple(lines))
        if exposure := _exposure(output_rows):
            yield _exposure_table(f"{model}: {task}, {setting}: effective KV exposure", exposure)


def _outputs(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    outputs: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        outputs[row["model"], row["task"], row["setting"]].append(row)
    return outputs


def _policies(rows: Sequence[Row]) -> _Points:
    """Each policy with its budgets and rows."""
    policies: dict[str, list[tuple[float, Row]]] = defaultdict(list)
    for row in main_rows(rows):
        if (policy := policy_of(row)) is not None:
            policies[policy[0]].append((policy[1], row))
    return policies


def _budgets(name: str, title: str, policies: _Points, rows: Sequence[Row]) -> Chart:
    series = tuple(
        series_of(rows, policy, [(100 * budget, row) for budget, row in points])
        for policy, points in policies.items()
    )
    ends = sorted({x for line in series for x in line.x})
    levels = tuple(
        Series(row["arm"], (ends[0], ends[-1]), (100 * float(row["value"]),) * 2)
        for row in main_rows(rows)
        if policy_of(row) is None
    )
    return Chart(name, title, _SHARE, series, x_label=_BUDGET, points=levels)


def _exposure(rows: Sequence[Row]) -> _Exposure:
    """Exposure after each number of later rows, by budget and window, grouped by policy.

    Exposure counts sealed reads. It is undefined for stale rows, which keep reads of other
    pages."""
    exposures: dict[tuple[str, float, int], dict[int, float]] = defaultdict(dict)
    for row in rows:
        policy = policy_of(row)
        if policy is None or not row["metric"].startswith("exposure_"):
            continue
        if policy[0].endswith(_STALE):
            continue
        name, window = policy[0].split(_REVISED)
        later = int(row["metric"].removeprefix("exposure_"))
        exposures[name, policy[1], int(window)][later] = float(row["value"])
    # the label omits the policy's own name: "every layer" remains
    return {
        ", ".join([f"{100 * budget:g} %", *name.split(", ")[1:], f"revise {window}"]): ratios
        for (name, budget, window), ratios in sorted(exposures.items())
    }


def _widest(exposure: _Exposure) -> Iterator[Series]:
    """A line per budget, of the widest measured window."""
    windows = {name: int(name.rpartition(_REVISED)[2]) for name in exposure}
    for name, ratios in exposure.items():
        if windows[name] == max(windows.values()):
            x, y = zip(*sorted(ratios.items()), strict=True)
            yield Series(name, tuple(map(float, x)), tuple(y))


def _exposure_table(title: str, exposure: _Exposure) -> Table:
    later = sorted({n for ratios in exposure.values() for n in ratios})
    published = {int(x): y for x, y in zip(_PUBLISHED.x, _PUBLISHED.y, strict=True)}
    lines = [("published", *(_ratio(published.get(n)) for n in later))]
    for name, ratios in exposure.items():
        lines.append((name, *(_ratio(ratios.get(n)) for n in later)))
    return Table(title, ("later rows", *map(str, later)), tuple(lines))


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
