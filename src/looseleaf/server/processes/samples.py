"""Metrics of several processes as one exposition: counters and histograms add up."""

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest

Family = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]
"""Name, help text, type, and samples of a metric: name, labels and value."""

_SUMMED_GAUGES = ("looseleaf_http_requests", "process_")
_SUMS = ("counter", "histogram")
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


def counters_of(families: Iterable[Any]) -> list[Family]:
    """The metrics that only grow, which stay after the end of their process."""
    return [(name, text, kind, samples) for name, text, kind, samples in families if kind in _SUMS]


def exposition(processes: Iterable[Sequence[Any]]) -> bytes:
    """The exposition text of the metrics of all processes, merged as by `merged`."""
    return generate_latest(_Merged(merged(processes)))


def merged(processes: Iterable[Sequence[Any]]) -> list[Family]:
    """The metrics of all processes.

    Of a gauge that several processes have, the result has the largest value, except of requests
    under way and of the resources of a process, which add up."""
    families: dict[str, tuple[str, str, dict[Any, float]]] = {}
    for name, text, kind, samples in (family for process in processes for family in process):
        _, _, values = families.setdefault(name, (text, kind, {}))
        for sample, labels, value in samples:
            key = sample, tuple(sorted(labels.items()))
            known = values.get(key)
            values[key] = value if known is None else _joined(kind, sample, known, value)
    return [
        (name, text, kind, [(key[0], dict(key[1]), value) for key, value in values.items()])
        for name, (text, kind, values) in families.items()
    ]


def _joined(kind: str, name: str, first: float, second: float) -> float:
    if name.endswith(_FIRST):
        return min(first, second)
    if kind in _SUMS or name.startswith(_SUMMED_GAUGES):
        return first + second
    return max(first, second)


class _Merged:
    """A registry of merged metrics."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for name, text, kind, samples in self._families:
            metric = Metric(name, text, kind)
            for sample, labels, value in samples:
                metric.add_sample(sample, labels, value)
            yield metric
