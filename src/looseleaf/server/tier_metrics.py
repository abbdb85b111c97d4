"""Prometheus metrics of the engine's tiers."""

from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from looseleaf.tiers import Fault, TierState

_SUMS = (
    ("loads", "Documents loaded.", "loads"),
    ("writes", "Documents stored.", "stored"),
    ("refused", "Documents not admitted.", "refused"),
    ("evicted", "Documents evicted.", "evicted"),
    ("expired", "Documents expired.", "expired"),
    ("skipped_calls", "Calls skipped after too many failures of the tier.", "skipped"),
    ("read_bytes", "Bytes loaded.", "bytes_read"),
    ("written_bytes", "Bytes stored.", "bytes_written"),
    ("load_seconds", "Time spent loading.", "seconds"),
    ("write_seconds", "Time spent storing.", "write_seconds"),
)
_GAUGES = (
    ("documents", "Stored documents.", "records"),
    ("bytes", "Stored bytes.", "num_bytes"),
    ("given_up", "1 while the tier is skipped after too many failures.", "given_up"),
    ("latency_seconds", "Measured latency of a load.", "latency"),
    ("bytes_per_second", "Measured rate of a load.", "rate"),
)


def tier_metrics(tiers: Sequence[TierState], skipped_writes: int) -> Iterator[Metric]:
    """One metric family per counter, with a value for each tier; nothing without tiers."""
    if not tiers:
        return
    for name, text, field in _SUMS:
        family = CounterMetricFamily(f"looseleaf_tier_{name}", text, labels=["tier"])
        for tier in tiers:
            family.add_metric([tier.name], getattr(tier.counters, field))
        yield family
    for name, text, field in _GAUGES:
        gauge = GaugeMetricFamily(f"looseleaf_tier_{name}", text, labels=["tier"])
        for tier in tiers:
            value = getattr(tier, field)
            if value is not None:
                gauge.add_metric([tier.name], value)
        yield gauge
    faults = CounterMetricFamily(
        "looseleaf_tier_faults", "Failures by kind.", labels=["tier", "kind"]
    )
    for tier in tiers:
        for kind in get_args(Fault):
            faults.add_metric([tier.name, kind], tier.counters.faults.get(kind, 0))
    yield faults
    yield CounterMetricFamily(
        "looseleaf_tier_skipped_writes",
        "Documents not written to any tier because the write queue was full.",
        skipped_writes,
    )
