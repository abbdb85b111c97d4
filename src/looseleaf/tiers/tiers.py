"""All tiers of an engine: where a segment is, how it comes from there, and how it gets there."""

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
from looseleaf.tiers.asking import Asker
from looseleaf.tiers.ending import join_all
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.stores.arena import Arena
from looseleaf.tiers.stores.base import Tier, TierCounters, TierFault
from looseleaf.tiers.stores.disk import DiskTier
from looseleaf.tiers.stores.host import HostTier
from looseleaf.tiers.stores.ledger import Ledger
from looseleaf.tiers.stores.remote import RemoteTier
from looseleaf.tiers.transfer.load import Load
from looseleaf.tiers.transfer.loader import Loader
from looseleaf.tiers.transfer.pool_copy import Copied, PoolCopy
from looseleaf.tiers.transfer.probe import probe
from looseleaf.tiers.transfer.speed import Probe, TierSpeed
from looseleaf.tiers.transfer.writer import Writer

_GIB = 1 << 30
_LAST_WORDS_SECONDS = 30.0
_ENDING_SECONDS = 5.0
_LONGEST_LOOKUP = 0.25


@dataclass(frozen=True)
class Wanted:
    """A segment that is to be loaded: ``length`` tokens into ``pages``."""

    key: SegmentKey
    length: int
    pages: Sequence[int]


@dataclass(frozen=True)
class TierState:
    """A tier at one moment. ``records`` and ``num_bytes`` are None where they are somebody else's
    to count; ``given_up`` says that it failed too often and is left alone. ``latency`` (seconds)
    and ``rate`` (bytes a second) are None before anything was read."""

    name: str
    counters: TierCounters
    records: int | None = None
    num_bytes: int | None = None
    given_up: bool = False
    latency: float | None = None
    rate: float | None = None


class Tiers:
    """The tiers below one pool, fastest first. The engine's thread calls it; no call fails."""

    def __init__(self, pool: PagePool, tiers: Sequence[Tier], config: TierConfig) -> None:
        """``tiers`` in the order in which they are asked; one of them may be a `HostTier`."""
        self.copy = PoolCopy(pool, config.tier_packing)
        self.guards = [Guard(tier, _counters(tier)) for tier in tiers]
        hosts = [tier for tier in tiers if isinstance(tier, HostTier)]
        self.host = hosts[0] if hosts else None
        self.staging = Arena(int(config.staging_gib * _GIB), pinned=self.copy.on_gpu)
        self.speeds = {tier.name: TierSpeed() for tier in tiers}
        # a quarter of the cores: it is the system and zlib that work, not Python
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
        # what the host's memory holds is known at once
        lower = [guard for guard in self.guards if guard.tier is not self.host]
        self._askers = {guard.name: Asker(guard) for guard in lower}
        self.writer = Writer(self.copy, self.staging, self.host, lower, self.tend)
        self._closed = False
        if config.tier_ttl is not None:
            # what is past its time goes, also where nothing is ever written
            self.writer.do(self.tend)

    @classmethod
    def create(cls, config: TierConfig, pool: PagePool) -> "Tiers | None":
        """The tiers that are asked for, None if there are none.

        Raises InvalidOption for a folder that can't be used, a URL that can't be read, or a missing
        package; a server that does not answer is no error."""
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
            tiers.append(RemoteTier(config.remote_url, config.tier_timeout, config.tier_ttl))
        return cls(pool, tiers, config)

    def snapshot(self) -> tuple[TierState, ...]:
        """All tiers in numbers; asks none of them."""
        states = []
        for guard in self.guards:
            counters = replace(guard.counters, faults=dict(guard.counters.faults))
            tier, fit = guard.tier, self.speeds[guard.name].fit()
            books = tier.ledger if isinstance(tier, HostTier | DiskTier) else None
            states.append(
                TierState(
                    guard.name,
                    counters,
                    None if books is None else len(books),
                    None if books is None else books.used,
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
        """What happened at each tier."""
        return {guard.name: guard.counters for guard in self.guards}

    def find(self, keys: Sequence[SegmentKey]) -> dict[SegmentKey, list[str]]:
        """Which of ``keys`` are where, as far as can be told without reading them; the names of
        tiers in the order in which they are to be asked.

        What is in the memory of the host is not asked for elsewhere. Another tier is asked in a
        thread and waited for a quarter of a second: one that takes longer has nothing."""
        host = None if self.host is None else self.host.name
        found: dict[SegmentKey, list[str]] = {}
        for guard in self.guards:
            asked = [k for k in dict.fromkeys(keys) if host not in found.get(k, ())]
            if not asked:
                break
            act, nothing = _containing(asked), [False] * len(asked)
            asker = self._askers.get(guard.name)
            if asker is None:
                there = guard.call(act, nothing, proof=False)
            else:
                there = asker.ask(act, nothing, _LONGEST_LOOKUP)
            for key, is_there in zip(asked, there, strict=True):
                if is_there:
                    found.setdefault(key, []).append(guard.name)
        return found

    def measure(self) -> None:
        """Find out how fast the tiers are, with records of some megabytes; takes less than a second
        for each, and what it finds is corrected by every load."""
        for guard in self.guards:

            def act(tier: Tier) -> None:
                hands = self._loaders[tier.name].num_hands
                probes: list[Probe] = []
                try:
                    probes.extend(probe(tier, self.copy.pool.kv.device, hands))
                finally:
                    self.speeds[tier.name].observe_probes(probes)

            guard.call(act, None, writes=True)
            # what was only written to be measured is nobody's record
            guard.counters.stored = guard.counters.bytes_written = 0

    def tend(self) -> None:
        """Drop what is past its time, and count anew what others may have changed."""
        for guard in self.guards:
            if isinstance(guard.tier, HostTier | DiskTier):
                guard.call(_tend, None, proof=False, writes=True)

    def num_bytes(self, length: int) -> int:
        """Bytes of a segment of so many tokens, as this engine stores it."""
        return self.copy.num_bytes(-(-length // self.copy.pool.page_size))

    def predict(self, tier: str, num_bytes: Sequence[int]) -> float | None:
        """How many seconds it takes to load segments of these sizes from a tier together; None if
        nothing is known of it."""
        return self.speeds[tier].predict(*self._loaders[tier].largest_share(num_bytes))

    def slowdown(self, tier: str) -> float | None:
        """How many times as long loads from a tier take beside a pass whose kernels are launched
        one by one, 1 until there was such a load; None before there was one without."""
        speed = self.speeds[tier]
        return (speed.slowdown or 1.0) if speed.proven else None

    def load(self, wanted: Sequence[Wanted], tier: str) -> list[Load]:
        """Begin to load segments into their pages, in the order of ``wanted``. Whoever does so
        calls `wake` soon."""
        records = [self.copy.record(w.key, w.length, len(w.pages)) for w in wanted]
        pages = [w.pages for w in wanted]
        return self._loaders[tier].begin(list(zip(records, pages, strict=True)))

    def wake(self) -> None:
        """Go on with what was begun to load: to be called when what is urgent is launched."""
        for loader in self._loaders.values():
            loader.wake()

    def keep(self, wanted: Wanted, tenant: str = "", *, packed: bool = True) -> Copied | None:
        """Bring a finished segment to the tiers in the background, ``packed`` if this engine packs;
        None if it is left out. One that turns out not to be `Copied.whole` is to be kept again,
        not packed."""
        about = wanted.key, wanted.length, len(wanted.pages), tenant
        return self.writer.keep(self.copy.record(*about, packed=packed), wanted.pages)

    def when_written(self, tell: Callable[[], None]) -> None:
        """Call ``tell``, in the writer's thread, after all that is on its way has arrived, or
        failed to."""
        self.writer.do(tell)

    def look_up(self, key: SegmentKey, tell: Callable[[bool], None]) -> None:
        """Tell, in the background and after all that is on its way, whether a tier that outlives
        the process has a segment. Without such a tier nothing is told."""
        lasting = [guard for guard in self.guards if guard.tier is not self.host]

        def job() -> None:
            act = _containing([key])
            tell(any(guard.call(act, [False], proof=False)[0] for guard in lasting))

        if lasting:
            self.writer.do(job)

    def touch(self, keys: Sequence[SegmentKey]) -> None:
        """Documents were asked for again, and found in the pool: in the background every tier hears
        of it as if it had been asked."""

        def job() -> None:
            for guard in self.guards:
                guard.call(lambda tier: _touch(tier, keys), None, proof=False)

        self.writer.do(job)

    def delete(self, keys: Sequence[SegmentKey]) -> None:
        """Drop segments everywhere, behind what is on its way."""

        def job() -> None:
            # the host's memory last: what is still coming to it from below finds nothing there
            for guard in reversed(self.guards):
                guard.call(lambda tier: tier.delete(keys), 0, writes=True)

        self.writer.do(job)

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        """Keep a segment in its tiers until it is unpinned, or let it go again."""

        def job() -> None:
            for guard in self.guards:
                guard.call(lambda tier: tier.pin(key, pinned), None)

        self.writer.do(job)

    def flush(self, seconds: float = _LAST_WORDS_SECONDS) -> bool:
        """Wait until all that was asked for is stored, for that long at most; whether it is."""
        return self.writer.flush(seconds)

    def close(self) -> None:
        """Finish writing, within reason, and let go of everything; what is loading fails. The
        threads have ended then, but for one that a tier keeps waiting."""
        if self._closed:
            return
        self._closed = True
        if threading.current_thread() in self._threads:
            # an engine that nobody held any more was collected there, and can't wait for itself
            threading.Thread(target=self._end, name="looseleaf-closing").start()
        else:
            self._end()

    @property
    def _threads(self) -> list[threading.Thread]:
        own = [self.writer.thread, *(asker.thread for asker in self._askers.values())]
        loading = [thread for loader in self._loaders.values() for thread in loader.threads]
        return [thread for thread in own if thread is not None] + loading

    def _end(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        for asker in self._askers.values():
            asker.close()
        self.writer.close(_LAST_WORDS_SECONDS)
        join_all(self._threads, _ENDING_SECONDS)
        for guard in self.guards:
            guard.call(lambda tier: tier.close(), None)


def tenant_of(salt: str) -> str:
    """What records say of a salt: enough to count its bytes, not enough to know it."""
    return hashlib.blake2b(salt.encode(), digest_size=8).hexdigest() if salt else ""


def _containing(keys: Sequence[SegmentKey]) -> Callable[[Tier], list[bool]]:
    return lambda tier: tier.contains(keys)


def _ledger(config: TierConfig, gib: float) -> Ledger:
    return Ledger(int(gib * _GIB), config.tier_ttl, config.tenant_share)


def _counters(tier: Tier) -> TierCounters:
    counters = getattr(tier, "counters", None)
    return counters if isinstance(counters, TierCounters) else TierCounters()


def _tend(tier: Tier) -> None:
    assert isinstance(tier, HostTier | DiskTier)
    tier.tend()


def _touch(tier: Tier, keys: Sequence[SegmentKey]) -> None:
    for key in keys:
        reader = tier.open(key)
        if reader is not None:
            reader.close()
