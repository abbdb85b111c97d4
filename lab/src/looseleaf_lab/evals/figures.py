"""From scored answers to rows: one row a metric, with its mean and its interval."""

from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf_lab.evals.intervals import bootstrap, interval, paired
from looseleaf_lab.evals.run import Scored
from looseleaf_lab.evals.task import Arm, Task


@dataclass(frozen=True)
class Figure:
    """The mean of one metric over ``items`` answers, with a 95 % interval.

    ``metric`` is one of the task's scores, or of the arm's figures about how it answered.
    ``against`` names the arm that ``gain`` is over, item by item; both are empty without one.
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
    scored: Sequence[Scored],
    baseline: tuple[str, Sequence[Scored]] | None = None,
) -> list[Figure]:
    """Rows of one run: the task's metrics, then the arm's figures.

    ``baseline`` is another arm's name and its answers to the same items: the first metric's row
    then has the paired difference. A figure that some answers lack is the mean over the others."""
    about = (model, task.name, task.setting, arm.name, f"{seeds.start}-{seeds.stop - 1}")
    figures = []
    for number, metric in enumerate(scored[0].metrics):
        values = [one.metrics[metric] for one in scored]
        gain = _gain(metric, scored, baseline) if number == 0 else ()
        figures.append(_figure(about, metric, values, interval(values), gain))
    for metric in sorted({name for one in scored for name in one.answer.report}):
        values = [one.answer.report[metric] for one in scored if metric in one.answer.report]
        figures.append(_figure(about, metric, values, bootstrap(values), ()))
    return figures


def _figure(
    about: tuple[str, str, str, str, str],
    metric: str,
    values: Sequence[float],
    bounds: tuple[float, float],
    gain: tuple[str, float, float, float] | tuple[()],
) -> Figure:
    mean = sum(values) / len(values)
    return Figure(*about, metric, len(values), mean, *bounds, *gain)


def _gain(
    metric: str, scored: Sequence[Scored], baseline: tuple[str, Sequence[Scored]] | None
) -> tuple[str, float, float, float] | tuple[()]:
    if baseline is None:
        return ()
    name, others = baseline
    pairs = zip(scored, others, strict=True)
    differences = [ours.metrics[metric] - theirs.metrics[metric] for ours, theirs in pairs]
    return (name, sum(differences) / len(differences), *paired(differences))
