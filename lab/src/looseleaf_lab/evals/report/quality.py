"""Charts and tables of ``evals.csv``: tasks by arm, lengths, and policies by budget."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from looseleaf_lab.evals.report.charts import Chart
from looseleaf_lab.evals.report.rows import (
    Row,
    Series,
    length_of,
    main_rows,
    policy_of,
    series_of,
)
from looseleaf_lab.evals.report.tables import Table, percent_of

_SHARE = "right, %"


def quality_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Per model: bars of all tasks, lines over lengths, lines over budgets."""
    by_model: dict[str, list[Row]] = defaultdict(list)
    for row in main_rows(rows):
        by_model[row["model"]].append(row)
    for model, model_rows in by_model.items():
        short = [row for row in model_rows if length_of(row) is None and policy_of(row) is None]
        if short:
            yield _tasks(model, short)
        lengths = [row for row in model_rows if length_of(row) is not None]
        for task in dict.fromkeys(_task_of(row) for row in lengths):
            task_rows = [row for row in lengths if _task_of(row) == task]
            if len({row["setting"] for row in task_rows}) > 1:
                yield _lengths(model, task, task_rows)
        yield from _budgets(model, model_rows)


def budget_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Lines over budgets, for a file with one kind of policy."""
    main = main_rows(rows)
    for model in dict.fromkeys(row["model"] for row in main):
        yield from _budgets(model, [row for row in main if row["model"] == model])


def quality_table(rows: Sequence[Row]) -> Table:
    """Every figure with its interval: a line per task and setting, a column per arm."""
    main = main_rows(rows)
    columns = list(dict.fromkeys((row["model"], row["arm"]) for row in main))
    lines: dict[tuple[str, str], dict[tuple[str, str], str]] = defaultdict(dict)
    for row in main:
        lines[row["task"], row["setting"]][row["model"], row["arm"]] = percent_of(row)
    return Table(
        "Right answers, percent (95 % interval; items)",
        ("task", "setting", *(f"{model}, {arm}" for model, arm in columns)),
        tuple(
            (task, setting, *(cells.get(column, "") for column in columns))
            for (task, setting), cells in lines.items()
        ),
    )


def _tasks(model: str, rows: Sequence[Row]) -> Chart:
    names = list(dict.fromkeys(f"{row['task']}, {row['setting']}" for row in rows))
    tasks = [name.partition(", ")[0] for name in names]
    # settings of one task are adjacent, ordered by their numbers
    names.sort(
        key=lambda name: (
            tasks.index(name.partition(", ")[0]),
            [int(number) for number in re.findall(r"\d+", name)],
        )
    )
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    series = []
    for arm in arms:
        points = [
            (float(names.index(f"{row['task']}, {row['setting']}")), row)
            for row in rows
            if row["arm"] == arm
        ]
        series.append(series_of(rows, arm, points))
    groups = tuple(name.replace(", 6 documents", "") for name in names)
    return Chart(f"tasks_{model}", f"{model}: tasks", _SHARE, tuple(series), groups)


def _task_of(row: Row) -> str:
    """A task with its setting except for the length: ``needle, 8 needles``."""
    return ", ".join([row["task"], *row["setting"].split(", ")[1:]])


def _lengths(model: str, task: str, rows: Sequence[Row]) -> Chart:
    series = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        points = [(float(length_of(row) or 0), row) for row in rows if row["arm"] == arm]
        series.append(series_of(rows, arm, points))
    name = f"lengths_{model}_{task}".replace(" ", "_").replace(",", "")
    return Chart(
        name, f"{model}: {task}", _SHARE, tuple(series), x_label="tokens of context", log_x=True
    )


def _budgets(model: str, rows: Sequence[Row]) -> Iterator[Chart]:
    """A chart per task and setting with a policy at several budgets."""
    by_task: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_task[row["task"], row["setting"]].append(row)
    for (task, setting), setting_rows in by_task.items():
        policies: dict[str, list[tuple[float, Row]]] = defaultdict(list)
        for row in setting_rows:
            policy = policy_of(row)
            if policy is not None:
                policies[policy[0]].append((policy[1], row))
        swept = {name: points for name, points in policies.items() if len(points) > 1}
        if not swept:
            continue
        series = [series_of(setting_rows, name, points) for name, points in swept.items()]
        ends = sorted({x for line in series for x in line.x})
        rows_without_budget = [row for row in setting_rows if policy_of(row) is None]
        lines = tuple(
            Series(row["arm"], (ends[0], ends[-1]), (100 * float(row["value"]),) * 2)
            for row in rows_without_budget
        )
        name = f"budgets_{model}_{task}_{setting}".replace(" ", "_").replace(",", "")
        title = f"{model}: {task}, {setting}"
        yield Chart(name, title, _SHARE, tuple(series), x_label="budget", points=lines)
