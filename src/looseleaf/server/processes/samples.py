"""Metrics of several processes as one exposition: counters and histograms add up."""

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest

Family = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]
"""Name, help text, type, and samples of a metric: name, labels and value."""

_SUMMED_GAUGES = ("looseleaf_http_requests", "process_")
_FIRST = ("_created", "process_start_time_seconds")


def families_of(registry: CollectorRegistry) -> list[Family]:
    """The metrics of one process as plain data."""
    return [
        (
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def exposition(processes: Iterable[Sequence[Any]]) -> bytes:
    """The exposition text of the metrics of all processes.

    Of a gauge that several processes have, the text has the largest value, except of requests
    under way and of the resources of a process, which add up."""
    families: dict[str, tuple[str, str, dict[Any, float]]] = {}
    for name, text, kind, samples in (family for process in processes for family in process):
        _, _, values = families.setdefault(name, (text, kind, {}))
        for sample, labels, value in samples:
            key = sample, tuple(sorted(labels.items()))
            known = values.get(key)
            values[key] = value if known is None else _joined(kind, sample, known, value)
    return generate_latest(_Merged(families))


def _joined(kind: str, name: str, first: float, second: float) -> float:
    if name.endswith(_FIRST):
        return min(first, second)
    if kind in ("counter", "histogram", "summary") or name.startswith(_SUMMED_GAUGES):
        return first + second
    return max(first, second)


class _Merged:
    """A registry of merged metrics."""

    def __init__(self, families: dict[str, tuple[str, str, dict[Any, float]]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for name, (text, kind, values) in self._families.items():
            metric = Metric(name, text, kind)
            for (sample, labels), value in values.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric
