"""Charts and tables of ``roll_call.csv`` and ``interview.csv``: long outputs, by what each of their
tokens reads."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from looseleaf.evals.report.charts import Chart
from looseleaf.evals.report.rows import Row, Series, main_rows, policy_of, series_of
from looseleaf.evals.report.tables import Table

_SHARE = "right, %"
_BUDGET = "keys read, % of the context"
_REVISED = ", revise "
# RetroAttention (arXiv 2508.09001): with one later row and with seven
_PUBLISHED = Series("published", (1.0, 7.0), (1.17, 1.60))

_Points = Mapping[str, Sequence[tuple[float, Row]]]


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
        if exposure := tuple(_exposure(own)):
            yield Chart(
                f"exposure_{name}",
                about,
                "pages seen, over those of a row's own step",
                exposure,
                x_label="later rows",
                points=(_PUBLISHED,),
            )


def reading_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """For each model and task a line a policy, a column a budget."""
    for (model, task, setting), own in _outputs(rows).items():
        policies = _policies(own)
        budgets = sorted({budget for points in policies.values() for budget, _ in points})
        lines = [
            (row["arm"], *([_cell(row)] * len(budgets)))
            for row in main_rows(own)
            if policy_of(row) is None
        ]
        for name, points in policies.items():
            cells = dict(points)
            found = (cells.get(budget) for budget in budgets)
            lines.append((name, *(_cell(row) if row else "" for row in found)))
        title = f"{model}: {task}, {setting}: right answers, percent (95 % interval; outputs)"
        heads = (f"{100 * budget:g} %" for budget in budgets)
        yield Table(title, ("reads", *heads), tuple(lines))


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


def _exposure(rows: Sequence[Row]) -> Iterator[Series]:
    """One line a budget, of the widest window that was run."""
    found: dict[tuple[int, float], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        policy = policy_of(row)
        if policy is None or not row["metric"].startswith("exposure_"):
            continue
        window = int(policy[0].split(_REVISED)[1])
        later = float(row["metric"].removeprefix("exposure_"))
        found[window, policy[1]].append((later, float(row["value"])))
    widest = max((window for window, _ in found), default=0)
    for (window, budget), points in sorted(found.items()):
        if window == widest:
            x, y = zip(*sorted(points), strict=True)
            yield Series(f"{100 * budget:g} %, revise {window}", tuple(x), tuple(y))


def _cell(row: Row) -> str:
    value, low, high = (100 * float(row[name]) for name in ("value", "low", "high"))
    return f"{value:.1f} ({low:.1f} to {high:.1f}; {row['items']})"
