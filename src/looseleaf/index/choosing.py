"""Choice of the index kind for a set of keys, by measurement on held-out queries.

Clustered keys favour ivf, unclustered keys the graph, few keys the flat index. The index keeps the
least effort that reaches the required recall."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config.index import IndexConfig, IndexKind
from looseleaf.errors import InvalidOption
from looseleaf.index.base import CPU, Hits, KVIndex
from looseleaf.index.keys import KeyVectors
from looseleaf.index.make import build_index
from looseleaf.index.searching import search
from looseleaf.ops.nearest_keys import NearestKeys, nearest_keys

Cost = Literal["time", "scanned"]
_HELD_OUT = 128
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """Measurement of an index at the least effort that reaches the required recall, or at its most.

    ``scanned`` is the share of compared keys, centroids included. ``milliseconds`` is the CPU time
    of a query on one thread."""

    kind: IndexKind
    effort: int
    recall: float
    scanned: float
    milliseconds: float


@dataclass(frozen=True)
class Choice:
    """The chosen index, and the measurements of all kinds."""

    index: KVIndex
    trials: tuple[Trial, ...]


def choose_index(
    keys: KeyVectors,
    queries: Float[Tensor, "queries head_dim"],
    config: IndexConfig,
    *,
    cost: Cost = "time",
    device: torch.device = CPU,
    threads: int | None = None,
) -> Choice:
    """The cheapest index over ``keys`` with recall ``config.recall`` of the ``config.top`` nearest.

    If no kind reaches it, the index with the highest recall: narrower copies of keys, and a recall
    of 1, can make it unreachable. A part of ``queries`` is held out for the measurement. Raises
    InvalidOption with fewer than two queries."""
    if len(queries) < 2:
        raise InvalidOption(
            f"choosing an index takes at least two queries, not {len(queries)}: give more, or a "
            "kind other than 'auto'"
        )
    step = max(2, len(queries) // _HELD_OUT)
    held_out = torch.arange(len(queries)) % step == 0
    nearest = nearest_keys(queries[held_out].to(device), keys.source.wide(device), config.top)
    exact = NearestKeys(nearest.ids.cpu(), nearest.scores.cpu())
    indexes: list[KVIndex] = []
    trials: list[Trial] = []
    kinds: tuple[IndexKind, ...] = ("flat", "ivf", "graph")
    for kind in kinds:
        index = build_index(keys, replace(config, kind=kind), queries[~held_out], device, threads)
        trial = _least_effort(index, queries[held_out], exact, config.recall)
        trials.append(trial)
        index.effort = trial.effort
        indexes.append(index)
    reached = [n for n, trial in enumerate(trials) if trial.recall >= config.recall]
    if reached:
        best = min(reached, key=lambda n: _price(trials[n], cost))
    else:
        best = max(range(len(trials)), key=lambda n: trials[n].recall)
        _log.warning(
            "no index over %s keys reaches recall %.4g: the %s index is used, with recall %.4g; "
            "set keys to a wider dtype, or a lower recall",
            config.keys, config.recall, kinds[best], trials[best].recall,
        )  # fmt: skip
    return Choice(indexes[best], tuple(trials))


def _price(trial: Trial, cost: Cost) -> float:
    return trial.milliseconds if cost == "time" else trial.scanned


def recall_of(hits: Hits, exact: NearestKeys) -> float:
    """The share of the exact nearest keys among ``hits``; 1.0 if there are no keys.

    A hit counts if it scores at least as high as the last exact key, because equal keys are
    interchangeable."""
    valid = exact.ids >= 0
    if not bool(valid.any()):
        return 1.0
    last = exact.scores.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    # scores of two implementations differ in their last bits
    slack = 1e-5 * last.abs().masked_fill(last.isinf(), 0.0) + 1e-6
    correct = ((hits.scores >= last - slack) & (hits.ids >= 0)).sum(1)
    return float(correct.minimum(valid.sum(1)).sum() / valid.sum())


def efforts(index: KVIndex, count: int) -> Iterator[int]:
    """Efforts to try for a search of ``count`` keys, ascending."""
    if index.kind == "flat":
        yield 0
        return
    effort = (count + 1) // 2 if index.kind == "graph" else 8
    most = len(index) if index.kind == "ivf" else 16 * count
    while effort < most:
        yield effort
        effort = max(effort + 1, effort * 5 // 4)
    yield most


def _least_effort(index: KVIndex, queries: Tensor, exact: NearestKeys, recall: float) -> Trial:
    trial: Trial | None = None
    for effort in efforts(index, exact.ids.shape[1]):
        # CPU time, so that load on the machine does not affect the choice
        start = time.thread_time()
        hits = search(index, queries, exact.ids.shape[1], effort)
        seconds = time.thread_time() - start
        trial = Trial(
            kind=index.config.kind,
            effort=effort,
            recall=recall_of(hits, exact),
            scanned=float(hits.scanned.double().mean()) / max(1, len(index)),
            milliseconds=1e3 * seconds / len(queries),
        )
        if trial.recall >= recall or trial.scanned > 0.5:
            break
    assert trial is not None
    return trial
