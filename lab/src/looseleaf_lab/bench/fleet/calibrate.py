"""The costs of a replica, from the times that its answers report."""

from collections.abc import Callable, Sequence

import numpy as np

from looseleaf.errors import LooseleafError
from looseleaf_lab.bench.fleet.costs import Costs
from looseleaf_lab.bench.fleet.real import Timed


def costs_of(times: Sequence[Timed], output_tokens: int, cores: int | None = None) -> Costs:
    """The median costs of requests; at least one has a cached and one a computed document.

    Raises LooseleafError for other requests."""
    cached = [t for t in times if not t.computed and t.tokens]
    computed = [t for t in times if t.computed]
    if not cached or not computed:
        raise LooseleafError(
            "too few requests for a calibration: raise --requests, so that a fifth of them has "
            "cached and computed documents"
        )

    def median(entries: Sequence[Timed], value: Callable[[Timed], float]) -> float:
        return float(np.median([value(entry) for entry in entries]))

    def service(entry: Timed) -> float:
        return entry.engine_first - entry.queued

    short, long = median(cached, service), median(computed, service)
    prefill = max(1e-7, (long - short) / median(computed, lambda t: t.computed))
    decode = max(
        1e-5,
        median(times, lambda t: t.engine_total - t.engine_first) / max(1, output_tokens - 1),
    )
    row = 0.02 * decode
    step = min(short, decode - row)
    return Costs(
        step=step,
        prefill=prefill,
        row=row,
        prompt=max(0.0, short - row - step - prefill * median(cached, lambda t: t.text_tokens)),
        overhead=max(0.0, median(times, lambda t: t.first_token - t.engine_first)),
        closing=max(
            0.0, median(times, lambda t: t.total - t.first_token - t.engine_total + t.engine_first)
        ),
        step_tokens=2048,
        cores=cores,
    )
