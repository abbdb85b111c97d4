"""All tiers of an engine: lookup, loading, write-back and deletion of segments."""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from looseleaf.config import TierConfig
from looseleaf.errors import InvalidOption
from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.pool import PagePool
from looseleaf.tiers.asking import LookupThread
from looseleaf.tiers.ending import join_all
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.stores.arena import Arena
from looseleaf.tiers.stores.base import Tier, TierCounters, TierFault
from looseleaf.tiers.stores.disk import DiskTier
from looseleaf.tiers.stores.host import HostTier
from looseleaf.tiers.stores.ledger import Ledger
from looseleaf.tiers.stores.shared import SharedTier, shared_tier
from looseleaf.tiers.transfer.load import Load
from looseleaf.tiers.transfer.loader import Loader
from looseleaf.tiers.transfer.pool_copy import PageExport, PoolCopy
from looseleaf.tiers.transfer.probe import probe
from looseleaf.tiers.transfer.speed import Probe, TierSpeed
from looseleaf.tiers.transfer.writer import Writer

_GIB = 1 << 30
_CLOSE_SECONDS = 30.0
_JOIN_SECONDS = 5.0
_LOOKUP_SECONDS = 0.25


@dataclass(frozen=True)
class PagedSegment:
    """A segment and its pages: ``length`` tokens in ``pages``."""

    key: SegmentKey
    length: int
    pages: Sequence[int]


@dataclass(frozen=True)
class TierState:
    """A tier at one moment.

    ``records`` and ``num_bytes`` are None for a server. ``given_up`` means that calls are paused
    after failures. ``latency`` (seconds) and ``rate`` (bytes per second) are None before the first
    read."""

    name: str
    counters: TierCounters
    records: int | None = None
    num_bytes: int | None = None
    given_up: bool = False
    latency: float | None = None
    rate: float | None = None


class Tiers:
    """The tiers of one pool, fastest first. Only the engine's thread calls it; no call fails."""

    def __init__(self, pool: PagePool, tiers: Sequence[Tier], config: TierConfig) -> None:
        """``tiers`` are in lookup order; at most one is a `HostTier`."""
        self.config = config
        self.copy = PoolCopy(pool, config.tier_packing)
        self.guards = [Guard(tier, _counters(tier)) for tier in tiers]
        hosts = [tier for tier in tiers if isinstance(tier, HostTier)]
        self.host = hosts[0] if hosts else None
        self.staging = Arena(int(config.staging_gib * _GIB), pinned=self.copy.on_gpu)
        self.speeds = {tier.name: TierSpeed() for tier in tiers}
        # a quarter of the cores, because system calls and zlib run outside the interpreter
        num_threads = max(2, min(8, (os.cpu_count() or 2) // 4))
        self._loaders = {
            guard.name: Loader(
                guard,
                self.copy,
                self.staging,
                self.host,
                config.tier_timeout,
                self.speeds[guard.name].observe_load,
                num_threads,
            )
            for guard in self.guards
        }
        # host memory answers immediately
        lower = [guard for guard in self.guards if guard.tier is not self.host]
        self._lookup_threads = {guard.name: LookupThread(guard) for guard in lower}
        self.writer = Writer(self.copy, self.staging, self.host, lower, self.maintain)
        self._closed = False
        if config.tier_ttl is not None:
            # expiry also runs if nothing is ever written
            self.writer.do(self.maintain)

    @classmethod
    def create(cls, config: TierConfig, pool: PagePool) -> "Tiers | None":
        """The configured tiers, None if there are none.

        Raises InvalidOption for an unusable folder, an invalid URL, or a missing package. A server
        that does not reply is no error."""
        if not config.any:
            return None
        tiers: list[Tier] = []
        if config.host_gib:
            ledger = _ledger(config, config.host_gib)
            tiers.append(HostTier(ledger, pinned=pool.kv.is_cuda))
        if config.disk_path:
            try:
                folder = Path(config.disk_path).expanduser()
                tiers.append(DiskTier(folder, _ledger(config, config.disk_gib)))
            except TierFault as fault:
                raise InvalidOption(
                    f"disk_path {config.disk_path} can't be used ({fault}): choose a folder that "
                    "can be written to",
                    "disk_path",
                ) from fault
        if config.remote_url:
            tiers.append(shared_tier(config.remote_url, config.tier_timeout, config.tier_ttl))
        return cls(pool, tiers, config)

    @property
    def shared(self) -> SharedTier | None:
        """The tier by which engines agree on computations; None unless that is configured."""
        remotes = [guard.tier for guard in self.guards if isinstance(guard.tier, SharedTier)]
        return remotes[0] if remotes and self.config.compute_once else None

    def snapshot(self) -> tuple[TierState, ...]:
        """The state of all tiers, without calls to them."""
        states = []
        for guard in self.guards:
            counters = replace(guard.counters, faults=dict(guard.counters.faults))
            tier, fit = guard.tier, self.speeds[guard.name].fit()
            ledger = tier.ledger if isinstance(tier, HostTier | DiskTier) else None
            states.append(
                TierState(
                    guard.name,
                    counters,
                    None if ledger is None else len(ledger),
                    None if ledger is None else ledger.used,
                    guard.breaker.is_open,
                    *(fit or (None, None)),
                )
            )
        return tuple(states)

    @property
    def skipped_writes(self) -> int:
        """Segments that were not written since too much was under way."""
        return self.writer.skipped

    @property
    def counters(self) -> dict[str, TierCounters]:
        """Counters by tier."""
        return {guard.name: guard.counters for guard in self.guards}

    def find(self, keys: Sequence[SegmentKey]) -> dict[SegmentKey, list[str]]:
        """The tiers that hold each of ``keys``, in load order.

        Keys in host memory are not looked up elsewhere. Other tiers get a quarter of a second each,
        and count as empty after that."""
        host = None if self.host is None else self.host.name
        tiers_by_key: dict[SegmentKey, list[str]] = {}
        for guard in self.guards:
            missing_keys = [k for k in dict.fromkeys(keys) if host not in tiers_by_key.get(k, ())]
            if not missing_keys:
                break
            act, absent = _containing(missing_keys), [False] * len(missing_keys)
            lookup_thread = self._lookup_threads.get(guard.name)
            if lookup_thread is None:
                present = guard.call(act, absent, proof=False)
            else:
                present = lookup_thread.call(act, absent, _LOOKUP_SECONDS)
            for key, is_present in zip(missing_keys, present, strict=True):
                if is_present:
                    tiers_by_key.setdefault(key, []).append(guard.name)
        return tiers_by_key

    def measure(self) -> None:
        """Measures all tiers with probe records, in less than a second each; loads refine the
        result."""
        for guard in self.guards:

            def act(tier: Tier) -> None:
                workers = self._loaders[tier.name].num_workers
                probes: list[Probe] = []
                try:
                    probes.extend(probe(tier, self.copy.pool.kv.device, workers))
                finally:
                    self.speeds[tier.name].observe_probes(probes)

            guard.call(act, None, writes=True)
            # probe records do not count as stored
            guard.counters.stored = guard.counters.bytes_written = 0

    def maintain(self) -> None:
        """Deletes expired records and rescans shared folders."""
        for guard in self.guards:
            if isinstance(guard.tier, HostTier | DiskTier):
                guard.call(_maintain, None, proof=False, writes=True)

    def num_bytes(self, length: int) -> int:
        """Bytes of a segment of ``length`` tokens as stored by this engine."""
        return self.copy.num_bytes(-(-length // self.copy.pool.page_size))

    def predict(self, tier: str, num_bytes: Sequence[int]) -> float | None:
        """Seconds to load segments of these sizes together from a tier; None if unknown."""
        return self.speeds[tier].predict(*self._loaders[tier].largest_share(num_bytes))

    def slowdown(self, tier: str) -> float | None:
        """The factor by which loads slow down beside a pass whose kernels are launched one by one.

        1 before such a load; None before any other load."""
        speed = self.speeds[tier]
        return (speed.slowdown or 1.0) if speed.calibrated else None

    def load(self, segments: Sequence[PagedSegment], tier: str) -> list[Load]:
        """Starts loading segments into their pages, in order. The caller calls `wake` soon."""
        records = [
            self.copy.record(segment.key, segment.length, len(segment.pages))
            for segment in segments
        ]
        pages = [segment.pages for segment in segments]
        return self._loaders[tier].begin(list(zip(records, pages, strict=True)))

    def wake(self) -> None:
        """Completes submitted loads; called after the step is launched."""
        for loader in self._loaders.values():
            loader.wake()

    def write_back(
        self, segment: PagedSegment, tenant: str = "", *, packed: bool = True
    ) -> PageExport | None:
        """Starts storing a finished segment in the background; None if it is skipped.

        An export that is not `PageExport.is_valid` has to be stored again with ``packed=False``."""
        record = self.copy.record(
            segment.key, segment.length, len(segment.pages), tenant, packed=packed
        )
        return self.writer.write_back(record, segment.pages)

    def when_written(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` in the writer's thread after all pending writes have ended."""
        self.writer.do(callback)

    def look_up(self, key: SegmentKey, callback: Callable[[bool], None]) -> None:
        """Calls ``callback`` after all pending writes, with whether a persistent tier has a
        segment.

        Does nothing without a persistent tier."""
        persistent = [guard for guard in self.guards if guard.tier is not self.host]

        def job() -> None:
            act = _containing([key])
            callback(any(guard.call(act, [False], proof=False)[0] for guard in persistent))

        if persistent:
            self.writer.do(job)

    def touch(self, keys: Sequence[SegmentKey]) -> None:
        """Records uses of documents in the pool with every tier, in the background."""

        def job() -> None:
            for guard in self.guards:
                guard.call(lambda tier: _touch(tier, keys), None, proof=False)

        self.writer.do(job)

    def delete(self, keys: Sequence[SegmentKey]) -> None:
        """Deletes segments from all tiers, after pending writes."""

        def job() -> None:
            # host memory last, because a running load may still commit to it
            for guard in reversed(self.guards):
                guard.call(lambda tier: tier.delete(keys), 0, writes=True)

        self.writer.do(job)

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        """Protects a segment from eviction in all tiers, or ends that."""

        def job() -> None:
            for guard in self.guards:
                guard.call(lambda tier: tier.pin(key, pinned), None)

        self.writer.do(job)

    def flush(self, seconds: float = _CLOSE_SECONDS) -> bool:
        """Waits up to ``seconds`` for pending writes; returns whether all have ended."""
        return self.writer.flush(seconds)

    def close(self) -> None:
        """Ends pending writes within a time limit, fails running loads, and joins the threads.

        A thread that hangs in a tier is not joined."""
        if self._closed:
            return
        self._closed = True
        if threading.current_thread() in self._threads:
            # the collector closed the engine in one of these threads, which can't join itself
            threading.Thread(target=self._end, name="looseleaf-closing").start()
        else:
            self._end()

    @property
    def _threads(self) -> list[threading.Thread]:
        own = [self.writer.thread, *(lookup.thread for lookup in self._lookup_threads.values())]
        loading = [thread for loader in self._loaders.values() for thread in loader.threads]
        return [thread for thread in own if thread is not None] + loading

    def _end(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        for lookup_thread in self._lookup_threads.values():
            lookup_thread.close()
        self.writer.close(_CLOSE_SECONDS)
        join_all(self._threads, _JOIN_SECONDS)
        for guard in self.guards:
            guard.call(lambda tier: tier.close(), None)


def tenant_of(salt: str) -> str:
    """A digest of a salt for the accounting of a tenant; empty for no salt."""
    return hashlib.blake2b(salt.encode(), digest_size=8).hexdigest() if salt else ""


def _containing(keys: Sequence[SegmentKey]) -> Callable[[Tier], list[bool]]:
    return lambda tier: tier.contains(keys)


def _ledger(config: TierConfig, gib: float) -> Ledger:
    return Ledger(int(gib * _GIB), config.tier_ttl, config.tenant_share)


def _counters(tier: Tier) -> TierCounters:
    counters = getattr(tier, "counters", None)
    return counters if isinstance(counters, TierCounters) else TierCounters()


def _maintain(tier: Tier) -> None:
    assert isinstance(tier, HostTier | DiskTier)
    tier.maintain()


def _touch(tier: Tier, keys: Sequence[SegmentKey]) -> None:
    for key in keys:
        reader = tier.open(key)
        if reader is not None:
            reader.close()
