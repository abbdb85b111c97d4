"""What the tiers of the engine did and do, as metrics; nothing where there are none."""

from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from looseleaf.tiers import Fault, TierState

_SUMS = (
    ("loads", "Documents loaded.", "loads"),
    ("writes", "Documents stored.", "stored"),
    ("refused", "Documents not admitted.", "refused"),
    ("evicted", "Documents that made room.", "evicted"),
    ("expired", "Documents past their time.", "expired"),
    ("skipped_calls", "Calls not made, since the tier had failed too often.", "skipped"),
    ("read_bytes", "Bytes loaded.", "bytes_read"),
    ("written_bytes", "Bytes stored.", "bytes_written"),
    ("load_seconds", "Time spent loading.", "seconds"),
    ("write_seconds", "Time spent storing.", "write_seconds"),
)
_GAUGES = (
    ("documents", "Documents held.", "records"),
    ("bytes", "Bytes held.", "num_bytes"),
    ("given_up", "1 while the tier is left alone since it failed too often.", "given_up"),
    ("latency_seconds", "What a load takes however short it is, as measured.", "latency"),
    ("bytes_per_second", "Rate of a load, as measured.", "rate"),
)


def tier_metrics(tiers: Sequence[TierState], skipped_writes: int) -> Iterator[Metric]:
    """One family a number, with a value for every tier that has it."""
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
        "looseleaf_tier_faults", "Failures, by what was wrong.", labels=["tier", "kind"]
    )
    for tier in tiers:
        for kind in get_args(Fault):
            faults.add_metric([tier.name, kind], tier.counters.faults.get(kind, 0))
    yield faults
    yield CounterMetricFamily(
        "looseleaf_tier_skipped_writes",
        "Documents not written to any tier, since too much was under way.",
        skipped_writes,
    )
