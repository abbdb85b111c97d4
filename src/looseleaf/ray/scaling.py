"""The number of replicas: by requests in the queue and by pages in use."""

import math
from typing import Any

FULL = 0.8
"""Share of pages in use at which a replica counts as full."""


def queue_and_pages(context: Any) -> tuple[int, dict[str, Any]]:
    """The number of replicas, within the deployment's limits; a policy of Ray Serve.

    Each replica takes ``target_ongoing_requests``, and uses at most `FULL` of its pages."""
    target = context.config.target_ongoing_requests
    by_queue = context.total_num_requests / target
    shares = (context.aggregated_metrics or {}).get("pages_in_use", {})
    by_pages = sum(shares.values()) / FULL
    number = max(1, math.ceil(by_queue - 1e-9), math.ceil(by_pages - 1e-9))
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(number, least), most), {}
