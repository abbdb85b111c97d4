"""Charts and tables of ``roll_call.csv`` and ``interview.csv``: long outputs, by what each of their
tokens reads."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from looseleaf_lab.evals.report.charts import Chart
from looseleaf_lab.evals.report.rows import Row, Series, main_rows, policy_of, series_of
from looseleaf_lab.evals.report.tables import Table, percent_of

_SHARE = "right, %"
_BUDGET = "keys read, % of the context"
_REVISED = ", revise "
_STALE = ", stale"
# RetroAttention (arXiv 2508.09001): with one later row and with seven
_PUBLISHED = Series("published", (1.0, 7.0), (1.17, 1.60))

_Points = Mapping[str, Sequence[tuple[float, Row]]]
_Exposure = Mapping[str, Mapping[int, float]]


def reading_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each model and task: policies by budget, revision by budget, exposure by later rows."""
    for (model, task, setting), own in _outputs(rows).items():
        about = f"{model}: {task}, {setting}"
        name = f"{model}_{task}_{setting}".replace(" ", "_").replace(",", "")
        policies = _policies(own)
        alone = {key: points for key, points in policies.items() if _REVISED not in key}
        if alone:
            yield _budgets(f"select_{name}", about, alone, own)
        revised = {
            key: points
            for key, points in policies.items()
            if key.split(_REVISED)[0] in {k.split(_REVISED)[0] for k in policies if _REVISED in k}
        }
        if revised:
            yield _budgets(f"revise_{name}", about, revised, own)
        if exposure := tuple(_widest(_exposure(own))):
            yield Chart(
                f"exposure_{name}",
                about,
                "pages seen, over those of a row's own step",
                exposure,
                x_label="later rows",
                points=(_PUBLISHED,),
            )


def reading_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """For each model and task: a line a policy and a column a budget; and where rows are revised,
    the pages that they saw over those of their own step, by later rows."""
    for (model, task, setting), own in _outputs(rows).items():
        policies = _policies(own)
        budgets = sorted({budget for points in policies.values() for budget, _ in points})
        lines = [
            (row["arm"], *([percent_of(row)] * len(budgets)))
            for row in main_rows(own)
            if policy_of(row) is None
        ]
        for name, points in policies.items():
            cells = dict(points)
            found = (cells.get(budget) for budget in budgets)
            lines.append((name, *(percent_of(row) if row else "" for row in found)))
        title = f"{model}: {task}, {setting}: right answers, percent (95 % interval; outputs)"
        heads = (f"{100 * budget:g} %" for budget in budgets)
        yield Table(title, ("reads", *heads), tuple(lines))
        if exposure := _exposure(own):
            yield _exposure_table(f"{model}: {task}, {setting}: effective KV exposure", exposure)


def _outputs(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    found: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["model"], row["task"], row["setting"]].append(row)
    return found


def _policies(rows: Sequence[Row]) -> _Points:
    """Each policy with its budgets."""
    found: dict[str, list[tuple[float, Row]]] = defaultdict(list)
    for row in main_rows(rows):
        if (policy := policy_of(row)) is not None:
            found[policy[0]].append((policy[1], row))
    return found


def _budgets(name: str, title: str, policies: _Points, rows: Sequence[Row]) -> Chart:
    series = tuple(
        series_of(rows, policy, [(100 * budget, row) for budget, row in points])
        for policy, points in policies.items()
    )
    ends = sorted({x for one in series for x in one.x})
    level = tuple(
        Series(row["arm"], (ends[0], ends[-1]), (100 * float(row["value"]),) * 2)
        for row in main_rows(rows)
        if policy_of(row) is None
    )
    return Chart(name, title, _SHARE, series, x_label=_BUDGET, points=level)


def _exposure(rows: Sequence[Row]) -> _Exposure:
    """By budget and window, those of one policy together: the exposure after so many later rows.

    It counts what was sealed, so that it is not said of rows whose stale reads of other pages are
    theirs for good."""
    found: dict[tuple[str, float, int], dict[int, float]] = defaultdict(dict)
    for row in rows:
        policy = policy_of(row)
        if policy is None or not row["metric"].startswith("exposure_"):
            continue
        if policy[0].endswith(_STALE):
            continue
        name, window = policy[0].split(_REVISED)
        later = int(row["metric"].removeprefix("exposure_"))
        found[name, policy[1], int(window)][later] = float(row["value"])
    # of its name what comes after the policy's own: "every layer"
    return {
        ", ".join([f"{100 * budget:g} %", *name.split(", ")[1:], f"revise {window}"]): ratios
        for (name, budget, window), ratios in sorted(found.items())
    }


def _widest(exposure: _Exposure) -> Iterator[Series]:
    """One line a budget, of the widest window that was run."""
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
