"""Which index suits some keys: measured on queries that it was not built from.

Clustered keys favour clusters, keys without clusters the graph, few keys neither; nothing but a
measurement tells. The effort that reaches the wanted recall stays with the index."""

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
    """An index at the least effort that reached the wanted recall, or at its most.

    ``scanned`` is the share of the keys that were compared, centroids counted as keys;
    ``milliseconds`` of CPU time for one query on one thread."""

    kind: IndexKind
    effort: int
    recall: float
    scanned: float
    milliseconds: float


@dataclass(frozen=True)
class Choice:
    """The index that was chosen, and what every kind did."""

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
    """The cheapest index over ``keys`` that finds ``config.recall`` of the ``config.top`` nearest.

    Where none does, since they compare narrower copies or all are wanted, it is the one that finds
    most. A part of ``queries`` is held out to measure with. Raises InvalidOption with fewer than
    two queries."""
    if len(queries) < 2:
        raise InvalidOption("to measure an index takes at least two queries")
    step = max(2, len(queries) // _HELD_OUT)
    held = torch.arange(len(queries)) % step == 0
    found = nearest_keys(queries[held].to(device), keys.source.wide(device), config.top)
    exact = NearestKeys(found.ids.cpu(), found.scores.cpu())
    made: list[KVIndex] = []
    trials: list[Trial] = []
    kinds: tuple[IndexKind, ...] = ("flat", "ivf", "graph")
    for kind in kinds:
        index = build_index(keys, replace(config, kind=kind), queries[~held], device, threads)
        trial = _least_effort(index, queries[held], exact, config.recall)
        trials.append(trial)
        index.effort = trial.effort
        made.append(index)
    reached = [n for n, trial in enumerate(trials) if trial.recall >= config.recall]
    if reached:
        best = min(reached, key=lambda n: _price(trials[n], cost))
    else:
        best = max(range(len(trials)), key=lambda n: trials[n].recall)
        _log.warning(
            "no index over %s keys finds %.4g of the nearest: the %s index is taken, which finds "
            "%.4g; compare wider keys, or ask for a lower recall",
            config.keys, config.recall, kinds[best], trials[best].recall,
        )  # fmt: skip
    return Choice(made[best], tuple(trials))


def _price(trial: Trial, cost: Cost) -> float:
    return trial.milliseconds if cost == "time" else trial.scanned


def recall_of(hits: Hits, exact: NearestKeys) -> float:
    """The share of the exact nearest keys that were found; 1.0 if there are none.

    A key counts if its score is as good as the last exact one: of equal keys any will do."""
    wanted = exact.ids >= 0
    if not bool(wanted.any()):
        return 1.0
    last = exact.scores.masked_fill(~wanted, torch.inf).amin(1, keepdim=True)
    # scores of two implementations differ in their last bits
    slack = 1e-5 * last.abs().masked_fill(last.isinf(), 0.0) + 1e-6
    found = ((hits.scores >= last - slack) & (hits.ids >= 0)).sum(1)
    return float(found.minimum(wanted.sum(1)).sum() / wanted.sum())


def efforts(index: KVIndex, count: int) -> Iterator[int]:
    """From little to much: what is tried for an index."""
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
        # of this thread: what else the machine does must not choose
        start = time.thread_time()
        hits = search(index, queries, exact.ids.shape[1], effort)
        spent = time.thread_time() - start
        trial = Trial(
            kind=index.config.kind,
            effort=effort,
            recall=recall_of(hits, exact),
            scanned=float(hits.scanned.double().mean()) / max(1, len(index)),
            milliseconds=1e3 * spent / len(queries),
        )
        if trial.recall >= recall or trial.scanned > 0.5:
            break
    assert trial is not None
    return trial
