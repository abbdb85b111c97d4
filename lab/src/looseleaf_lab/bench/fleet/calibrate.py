"""The costs of a replica: their ratios from requests one at a time, their size under load.

Linear costs of a step are fitted to cached and computed documents of an idle server. Other
processes slow steps under load, so all of them are scaled to the duration of the load's steps."""

import re
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from looseleaf.errors import LooseleafError
from looseleaf_lab.bench.fleet.costs import Costs
from looseleaf_lab.bench.fleet.real import Timed

_ROW_SHARE = 0.02
"""The share of a row in a decode step of a small model."""


@dataclass(frozen=True)
class Totals:
    """Counters of all servers: steps with their seconds, computed prompt and sampled tokens."""

    steps: float
    seconds: float
    prompt_tokens: float
    output_tokens: float


_METRICS = ("step_seconds_count", "step_seconds_sum", "prompt_tokens_total", "output_tokens_total")


def read_totals(urls: Sequence[str]) -> Totals:
    """The sums of the counters that servers export at ``/metrics``."""
    sums = [0.0] * len(_METRICS)
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics") as response:
            content = response.read().decode()
        for place, name in enumerate(_METRICS):
            match = re.search(rf"^looseleaf_{name} (\S+)$", content, re.MULTILINE)
            if match is None:
                raise LooseleafError(f"{url}/metrics has no looseleaf_{name}")
            sums[place] += float(match[1])
    return Totals(*sums)


def idle_costs(times: Sequence[Timed], output_tokens: int) -> Costs:
    """The median costs of requests one at a time, some with cached and some with new documents.

    Raises LooseleafError for other requests."""
    cached = [t for t in times if not t.computed and t.tokens]
    computed = [t for t in times if t.computed]
    if not cached or not computed:
        raise LooseleafError("a calibration needs cached and computed documents: raise --room")
    short, long = _median(cached, _service), _median(computed, _service)
    prefill = max(1e-7, (long - short) / _median(computed, lambda t: t.computed))
    steps = max(1, output_tokens - 1)
    decode = max(1e-5, _median(times, lambda t: t.engine_total - t.engine_first) / steps)
    row = _ROW_SHARE * decode
    step = min(short, decode) - row
    text = _median(cached, lambda t: t.text_tokens)
    return Costs(
        step=step,
        prefill=prefill,
        row=row,
        prompt=max(0.0, short - row - step - prefill * text),
        step_tokens=2048,
    )


def loaded_costs(
    idle: Costs, sample: Sequence[Timed], requests: int, begin: Totals, end: Totals
) -> Costs:
    """``idle`` costs, scaled to the steps that computed ``requests`` between ``begin`` and ``end``.

    The time of a request outside of the engine is that of ``sample``, some of these requests."""
    predicted = (
        (end.steps - begin.steps) * idle.step
        + (end.prompt_tokens - begin.prompt_tokens) * idle.prefill
        + (end.output_tokens - begin.output_tokens) * idle.row
        + requests * idle.prompt
    )
    scale = (end.seconds - begin.seconds) / predicted
    overhead = max(0.0, _median(sample, lambda t: t.total - t.engine_total))
    return replace(
        idle,
        step=idle.step * scale,
        prefill=idle.prefill * scale,
        row=idle.row * scale,
        prompt=idle.prompt * scale,
        overhead=overhead,
        first_delay=_median(sample, lambda t: t.first_token - t.engine_first) - overhead,
    )


def _median(entries: Sequence[Timed], value: Callable[[Timed], float]) -> float:
    return float(np.median([value(entry) for entry in entries]))


def _service(entry: Timed) -> float:
    """Seconds from admission to the first token."""
    return entry.engine_first - entry.queued
