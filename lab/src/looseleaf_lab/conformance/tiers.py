"""Laws 6 and 7 for documents that come from a tier, and for tiers that lost or spoiled them."""

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

from looseleaf.engine.tiering.compute_time import ComputePace
from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Fault, Reader
from looseleaf.tiers.wrapping import WrappedTier
from looseleaf_lab.conformance.answers import Answers
from looseleaf_lab.conformance.subject import Answering, Asked, Subject
from looseleaf_lab.conformance.verdict import Finding

_GIB = 1 << 30
# seconds in which all that is on its way must have been written
_PATIENCE = 120.0
# seconds that a disk gets which will take longer
_TIMEOUT = 0.25


class NothingLoaded(Exception):
    """No document came from the tier, so that nothing was shown."""


def from_tiers(answers: Answers) -> list[Finding]:
    """Law 6: documents from the host's memory and from disk."""
    found = []
    for name in ("host", "disk"):
        with _tiered(answers.subject, name) as (engine, _):
            first, again = _cold_and_loaded(answers, engine, name, lambda: None)
        judged = answers.judge(name, first, _expected(answers))
        found.append(judged.against(f"documents from {name}", torch.cat(again)))
    return found


def lost_documents(answers: Answers) -> list[Finding]:
    """Law 7: files that are gone, cut short, or differ in a bit, and a disk that is too slow."""
    found = []
    for told, damage in _DAMAGES.items():
        options = {} if damage.timeout is None else {"tier_timeout": damage.timeout}
        with _expected_faults(), _tiered(answers.subject, "disk", **options) as (engine, folder):
            _, again = _cold_and_loaded(
                answers, engine, None, partial(damage.happen, engine, folder)
            )
            tiers = engine.engine.tiers
            assert tiers is not None
            faults = tiers.counters["disk"].faults
        judged = answers.judge(f"documents {told} on disk", again, _expected(answers))
        found.append(judged.finding())
        # a fault that no counter tells of is one that nobody will ever look into
        seen = damage.fault is None or faults.get(damage.fault, 0) > 0
        found.append(Finding(f"{told}: a counter says so", 0.0 if seen else 1.0, 0.0))
    return found


@contextmanager
def _expected_faults() -> Iterator[None]:
    """What tiers warn of is what is tried here, and nothing that anybody must look into."""
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
    """What happens to the disk while the pool forgets, and the fault that must be counted."""

    happen: Callable[[Answering, Path], None]
    fault: Fault | None
    timeout: float | None = None


def _to_files(act: Callable[[Path], None]) -> Callable[[Answering, Path], None]:
    def happen(engine: Answering, folder: Path) -> None:
        for path in sorted(folder.rglob("*.segment")):
            act(path)

    return happen


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _differs(path: Path) -> None:
    content = bytearray(path.read_bytes())
    # in the last layers' values, far behind the header
    content[-len(content) // 8] ^= 0x10
    path.write_bytes(content)


def _too_late(engine: Answering, folder: Path) -> None:
    tiers = engine.engine.tiers
    assert tiers is not None
    for guard in tiers.guards:
        guard.tier = _Late(guard.tier)


class _Late(WrappedTier):
    """A tier whose records are read long after their time is over."""

    def open(self, key: SegmentKey) -> Reader | None:
        """The record, too late."""
        reader = super().open(key)
        time.sleep(2 * _TIMEOUT)
        return reader


_DAMAGES: Mapping[str, _Damage] = MappingProxyType(
    {
        # what is not there is no fault of the tier
        "missing": _Damage(_to_files(Path.unlink), None),
        "cut short": _Damage(_to_files(_cut_short), "damaged"),
        "with a flipped bit": _Damage(_to_files(_differs), "damaged"),
        "that come too late": _Damage(_too_late, "timeout", _TIMEOUT),
    }
)


def _asked(answers: Answers) -> list[Asked]:
    cases = answers.subject.cases
    return [cases.several, *cases.others]


def _expected(answers: Answers) -> list[Any]:
    return [answers.reused(one) for one in _asked(answers)]


def _cold_and_loaded(
    answers: Answers, engine: Answering, tier: str | None, between: Callable[[], None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Answers before and after the pool forgot everything; ``between`` is done meanwhile.

    With ``tier`` at least one document must then come from it, else NothingLoaded is raised."""
    asked = _asked(answers)
    first = engine.ask(asked)
    tiers, store = engine.engine.tiers, engine.engine.store
    assert tiers is not None
    if not tiers.flush(_PATIENCE):
        raise NothingLoaded(f"the tier wrote nothing within {_PATIENCE:.0f} s")
    engine.engine.tiering.release_pages()
    store.evict_idle()
    between()
    watched = engine.watch(asked)
    sources = {d.tier for _, p in watched for d in p.output().reuse.documents}
    if tier is not None and tier not in sources:
        raise NothingLoaded(f"no document came from {tier}")
    return first, [logits for logits, _ in watched]


@contextmanager
def _tiered(subject: Subject, name: str, **more: Any) -> Iterator[tuple[Answering, Path]]:
    """An engine with that one tier, which takes every document from it, however quick to compute;
    and the folder of a disk."""
    shape = subject.loaded.shape
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * subject.dtype.itemsize
    room = max(0.02, 4 * subject.tokens * per_token / _GIB)
    options: dict[str, Any] = {"host_gib": 0.0, "disk_path": None, "remote_url": None}
    with tempfile.TemporaryDirectory(prefix="looseleaf-conformance-") as folder:
        options |= {"host_gib": room} if name == "host" else {"disk_path": folder}
        engine = subject.answering(**options, staging_gib=room, **more)
        controller = engine.engine.tiering.controller
        assert controller is not None
        # who knows nothing of how fast the model computes takes what a tier has
        controller.pace = ComputePace()
        try:
            yield engine, Path(folder)
        finally:
            engine.engine.close()
