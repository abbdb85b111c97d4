"""What decoding read of hosted documents, as metrics; nothing before the first read."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from looseleaf.attention.hosted import HostedCounters

_SUMS = (
    ("reads", "Reads of hosted documents by decoding rows, layers and query heads.", "reads"),
    ("keys", "Keys that these reads had before them.", "keys"),
    ("keys_read", "Keys that they attended to.", "keys_read"),
    ("keys_compared", "Vectors that their searches compared.", "keys_scanned"),
    ("searches_sampled", "Searches whose recall was measured.", "sampled"),
    ("recall_sum", "Sum of these searches' recall.", "recall_sum"),
)


def hosted_metrics(counters: HostedCounters | None) -> Iterator[Metric]:
    """One counter a number."""
    if counters is None or not counters.reads:
        return
    for name, text, field in _SUMS:
        family = CounterMetricFamily(f"looseleaf_hosted_{name}", text)
        family.add_metric([], getattr(counters, field))
        yield family
