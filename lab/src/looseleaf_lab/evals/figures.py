"""Rows from scored answers: one row per metric, with its mean and its interval."""

from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf_lab.evals.intervals import bootstrap, interval, paired
from looseleaf_lab.evals.run import ScoredItem
from looseleaf_lab.evals.task import Arm, Task


@dataclass(frozen=True)
class Figure:
    """The mean of one metric over ``items`` answers, with a 95 % interval.

    ``metric`` is a score of the task or a figure of the arm. ``gain`` is the item-wise difference
    over the arm ``against``; both are empty without a baseline.
    """

    model: str
    task: str
    setting: str
    arm: str
    seeds: str
    metric: str
    items: int
    value: float
    low: float
    high: float
    against: str = ""
    gain: float | str = ""
    gain_low: float | str = ""
    gain_high: float | str = ""


def summarize(
    model: str,
    task: Task,
    arm: Arm,
    seeds: range,
    scored: Sequence[ScoredItem],
    baseline: tuple[str, Sequence[ScoredItem]] | None = None,
) -> list[Figure]:
    """Rows of one run: the task's metrics, then the arm's figures.

    ``baseline`` is another arm's name and its answers to the same items; it adds the paired
    difference to the first metric's row. A figure's mean covers the answers that have it."""
    labels = (model, task.name, task.setting, arm.name, f"{seeds.start}-{seeds.stop - 1}")
    figures = []
    for number, metric in enumerate(scored[0].metrics):
        values = [item.metrics[metric] for item in scored]
        gain = _gain(metric, scored, baseline) if number == 0 else ()
        figures.append(_figure(labels, metric, values, interval(values), gain))
    for metric in sorted({name for item in scored for name in item.answer.report}):
        values = [item.answer.report[metric] for item in scored if metric in item.answer.report]
        figures.append(_figure(labels, metric, values, bootstrap(values), ()))
    return figures


def _figure(
    labels: tuple[str, str, str, str, str],
    metric: str,
    values: Sequence[float],
    bounds: tuple[float, float],
    gain: tuple[str, float, float, float] | tuple[()],
) -> Figure:
    mean = sum(values) / len(values)
    return Figure(*labels, metric, len(values), mean, *bounds, *gain)


def _gain(
    metric: str, scored: Sequence[ScoredItem], baseline: tuple[str, Sequence[ScoredItem]] | None
) -> tuple[str, float, float, float] | tuple[()]:
    if baseline is None:
        return ()
    name, baseline_items = baseline
    pairs = zip(scored, baseline_items, strict=True)
    differences = [ours.metrics[metric] - theirs.metrics[metric] for ours, theirs in pairs]
    return (name, sum(differences) / len(differences), *paired(differences))
