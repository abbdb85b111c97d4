"""Laws 6 and 7 for documents from a tier, also from a tier that lost or damaged them."""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Fault, Reader
from looseleaf.tiers.wrapping import WrappedTier
from looseleaf_lab.conformance.answers import Answers
from looseleaf_lab.conformance.subject import ScriptedEngine, ScriptedRequest, Subject
from looseleaf_lab.conformance.verdict import Finding

_GIB = 1 << 30
# limit for pending writes (s)
_PATIENCE = 120.0
# timeout of a disk that exceeds it (s)
_TIMEOUT = 0.25


class NothingLoaded(Exception):
    """No document came from the tier, so the law was not tested."""


def from_tiers(answers: Answers) -> list[Finding]:
    """Law 6: documents from host memory and from disk."""
    findings = []
    for name in ("host", "disk"):
        with _tiered(answers.subject, name) as (engine, _):
            first, loaded = _cold_and_loaded(answers, engine, name, lambda: None)
        comparison = answers.compare(name, first, _dense_logits(answers))
        findings.append(comparison.against(f"documents from {name}", torch.cat(loaded)))
    return findings


def lost_documents(answers: Answers) -> list[Finding]:
    """Law 7: files that are missing, truncated or off by a bit, and a disk that is too slow."""
    findings = []
    for label, damage in _DAMAGES.items():
        options = {} if damage.timeout is None else {"tier_timeout": damage.timeout}
        with _expected_faults(), _tiered(answers.subject, "disk", **options) as (engine, folder):
            _, loaded = _cold_and_loaded(
                answers, engine, None, partial(damage.apply, engine, folder)
            )
            tiers = engine.engine.tiers
            assert tiers is not None
            faults = tiers.counters["disk"].faults
        comparison = answers.compare(f"documents {label} on disk", loaded, _dense_logits(answers))
        findings.append(comparison.finding())
        # without a counter, operators never see the fault
        counted = damage.fault is None or faults.get(damage.fault, 0) > 0
        findings.append(Finding(f"{label}: a counter says so", 0.0 if counted else 1.0, 0.0))
    return findings


@contextmanager
def _expected_faults() -> Iterator[None]:
    """Suppress the warnings of tiers: this check causes the faults."""
    logger = logging.getLogger("looseleaf.tiers.guard")

    def is_worse(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    logger.addFilter(is_worse)
    try:
        yield
    finally:
        logger.removeFilter(is_worse)


@dataclass(frozen=True)
class _Damage:
    """A change to the disk between two runs, and the fault to be counted."""

    apply: Callable[[ScriptedEngine, Path], None]
    fault: Fault | None
    timeout: float | None = None


def _to_files(act: Callable[[Path], None]) -> Callable[[ScriptedEngine, Path], None]:
    def apply(engine: ScriptedEngine, folder: Path) -> None:
        for path in sorted(folder.rglob("*.segment")):
            act(path)

    return apply


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    # in the values of the last layers, far after the header
    content[-len(content) // 8] ^= 0x10
    path.write_bytes(content)


def _delay(engine: ScriptedEngine, folder: Path) -> None:
    tiers = engine.engine.tiers
    assert tiers is not None
    for guard in tiers.guards:
        guard.tier = _LateTier(guard.tier)


class _LateTier(WrappedTier):
    """A tier that opens records after their timeout."""

    def open(self, key: SegmentKey) -> Reader | None:
        """The record, after twice the timeout."""
        reader = super().open(key)
        time.sleep(2 * _TIMEOUT)
        return reader


_DAMAGES: Mapping[str, _Damage] = MappingProxyType(
    {
        # a missing file is no fault of the tier
        "missing": _Damage(_to_files(Path.unlink), None),
        "cut short": _Damage(_to_files(_truncate), "damaged"),
        "with a flipped bit": _Damage(_to_files(_flip_bit), "damaged"),
        "that come too late": _Damage(_delay, "timeout", _TIMEOUT),
    }
)


def _requests(answers: Answers) -> list[ScriptedRequest]:
    cases = answers.subject.cases
    return [cases.several, *cases.sharing]


def _dense_logits(answers: Answers) -> list[Any]:
    return [answers.reused(request) for request in _requests(answers)]


def _cold_and_loaded(
    answers: Answers, engine: ScriptedEngine, tier: str | None, between: Callable[[], None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Answers before and after the pool evicts everything; ``between`` runs in the middle.

    Raises NothingLoaded if documents were not written, or if none of them came from ``tier``."""
    requests = _requests(answers)
    first = engine.run(requests)
    tiers, store = engine.engine.tiers, engine.engine.store
    assert tiers is not None
    if not tiers.flush(_PATIENCE):
        raise NothingLoaded(f"the tier wrote nothing within {_PATIENCE:.0f} s")
    engine.engine.tiering.release_pages()
    store.evict_idle()
    between()
    results = engine.run_with_progress(requests)
    sources = {d.tier for _, p in results for d in p.output().reuse.documents}
    if tier is not None and tier not in sources:
        raise NothingLoaded(f"no document came from {tier}")
    return first, [logits for logits, _ in results]


@contextmanager
def _tiered(subject: Subject, name: str, **overrides: Any) -> Iterator[tuple[ScriptedEngine, Path]]:
    """An engine that always prefers its one tier, and the folder of a disk."""
    shape = subject.loaded.shape
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * subject.dtype.itemsize
    room = max(0.02, 4 * subject.tokens * per_token / _GIB)
    options: dict[str, Any] = {"host_gib": 0.0, "disk_path": None, "remote_url": None}
    with tempfile.TemporaryDirectory(prefix="looseleaf-conformance-") as folder:
        options |= {"host_gib": room} if name == "host" else {"disk_path": folder}
        engine = subject.scripted_engine(**options, staging_gib=room, **overrides)
        controller = engine.engine.tiering.controller
        assert controller is not None
        # without compute times the controller loads every document that a tier has
        controller.compute_time = ComputeTime()
        try:
            yield engine, Path(folder)
        finally:
            engine.engine.close()
