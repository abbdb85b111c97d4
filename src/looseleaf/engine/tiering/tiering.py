"""Tiering: loads from tiers and copies to tiers, between two steps of the engine.

Every document that is missing from the pool gets pages. It is *arriving* instead of owned if a tier
has it and loads faster than the model computes. Sequences that read an arriving document wait for
it, as for a document that another sequence computes. Without other work a step starts earlier and
waits layer by layer. After a failed load a waiting sequence computes the document."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from looseleaf.config import Fuse
from looseleaf.engine.progress import Deadlines
from looseleaf.engine.sequence import Sequence
from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.engine.tiering.load_controller import LoadingController, timed
from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.store import Segment, SegmentStore
from looseleaf.parallel import Ranks
from looseleaf.prompt.placements import DocumentUse
from looseleaf.tiers import Claims, Load, LoadState, PagedSegment, PageExport, Tiers


@dataclass(frozen=True, eq=False)
class Leaving:
    """A segment that is copied to the tiers, and its tenant. The segment is not evicted before the
    copy has ended."""

    segment: Segment
    tenant: str
    copied: PageExport


@dataclass(eq=False)
class Tiering:
    """The tiers of one engine, for its scheduler. Without tiers no segment arrives.

    ``measured_compute_time`` returns the model's compute time, and measures it on the first call.
    A step that waits for loads stops when ``hurry`` returns True or a deadline has passed; a later
    step computes the rest. ``arriving`` are the segments that load into the pool, ``leaving`` the
    segments that are copied to tiers. ``claims`` know the documents that other engines compute."""

    store: SegmentStore
    tiers: Tiers | None = None
    controller: LoadingController | None = None
    measured_compute_time: Callable[[], ComputeTime] = ComputeTime
    hurry: Callable[[], bool] = lambda: False
    deadlines: Deadlines = field(default_factory=Deadlines)
    arriving: dict[Segment, Load] = field(default_factory=dict)
    leaving: list[Leaving] = field(default_factory=list)
    claims: Claims | None = None
    ranks: Ranks | None = None
    # whether an idle step may wait for loads layer by layer
    layerwise: bool = True
    # documents read from the pool since the last write to the tiers
    _read: set[SegmentKey] = field(default_factory=set)

    def close(self) -> None:
        """Finish all writes and close the tiers."""
        if self.tiers is not None:
            self._tell_read()
            self.tiers.close()
        if self.claims is not None:
            self.claims.close()

    def awaits_others(self, sequence: Sequence) -> bool:
        """Whether another engine computes a document that the sequence lacks.

        Announces documents that no engine computes."""
        if self.claims is None:
            return False
        missing = [u.key for u in sequence.documents if u.num_tokens and not self._is_near(u.key)]
        return bool(missing) and self.claims.awaits(missing)

    def wait_for_others(self, seconds: float) -> None:
        """Wait until another engine may have computed a document, at most ``seconds``."""
        if self.claims is not None:
            self.claims.wait(seconds)

    def _is_near(self, key: SegmentKey) -> bool:
        host = None if self.tiers is None else self.tiers.host
        return self.store.find(key) is not None or (host is not None and host.contains([key])[0])

    def begin(self, sequence: Sequence, missing: Iterable[DocumentUse]) -> set[SegmentKey]:
        """Start the loads of documents that have pages, where loading is expected to pay off.

        Returns the keys of these documents. The engine computes the others."""
        uses = {use.key: use for use in missing if use.num_tokens}
        if self.tiers is None or self.controller is None or not uses:
            return set()
        holders = self._find(list(uses))
        stored = [use for key, use in uses.items() if key in holders]
        chosen = self._choose(sequence, stored, holders)
        for tier in dict.fromkeys(chosen.values()):
            targets = [self._target(uses[key]) for key, name in chosen.items() if name == tier]
            for load in self.tiers.load(targets, tier):
                segment = uses[load.record.key].segment
                assert segment is not None
                segment.arriving = load
                load.hurry = self._is_hurried
                self.arriving[segment] = load
                if sequence.arrivals is not None:
                    sequence.arrivals.loads.append(load)
        return set(chosen)

    def _find(self, keys: list[SegmentKey]) -> dict[SegmentKey, list[str]]:
        """The tiers that hold each document."""
        assert self.tiers is not None
        return self.tiers.find(keys)

    def _choose(
        self,
        sequence: Sequence,
        stored: list[DocumentUse],
        holders: dict[SegmentKey, list[str]],
    ) -> dict[SegmentKey, str]:
        """The tier that each document loads from; documents that are faster to compute are left
        out."""
        assert self.controller is not None
        return self.controller.choose(sequence, stored, holders)

    def balance(self, fuse: Fuse, sequence: Sequence) -> tuple[Fuse, float] | None:
        """The current budget of a balanced policy or of a policy with a budget in seconds.

        Returns the policy and the share of tokens that it computes again. Returns None for other
        policies, and for a balanced policy without tiers. ``sequence`` blends nothing yet."""
        if fuse.seconds is not None:
            return timed(fuse, sequence, self.measured_compute_time())
        if not fuse.balanced:
            return None
        if self.tiers is None or self.controller is None:
            return None
        missing = [u.key for u in sequence.documents if self.store.find(u.key) is None]
        return self.controller.balance(fuse, sequence, self.tiers.find(missing))

    def note_read(self, key: SegmentKey) -> None:
        """Record that a document was read from the pool.

        The tiers are notified before their next write, so that they do not evict this document."""
        if self.tiers is not None:
            self._read.add(key)

    def _tell_read(self) -> None:
        if self.tiers is not None and self._read:
            self.tiers.touch(list(self._read))
            self._read.clear()

    def settle(self) -> list[tuple[Segment, bool]]:
        """Segments whose load has ended, and whether it succeeded. Also releases the segments whose
        copy to the tiers has ended."""
        self._let_go()
        ended = []
        for (segment, load), state in zip(list(self.arriving.items()), self._states(), strict=True):
            if state == "loading":
                continue
            del self.arriving[segment]
            if state != "cancelled":
                # the state "done" implies that the last layer has arrived
                if state == "failed":
                    load.settle()
                segment.arriving = None
                ended.append((segment, state == "done"))
        return ended

    def _states(self) -> list[LoadState]:
        """The state of each arriving segment."""
        return [load.state for load in self.arriving.values()]

    def wait(self, seconds: float) -> None:
        """Wait until the oldest load has ended, at most ``seconds``."""
        self.wake()
        for load in list(self.arriving.values())[:1]:
            load.wait_for_end(seconds)

    def wake(self) -> None:
        """Let loads continue. The engine calls this after every launch."""
        if self.tiers is not None and self.arriving:
            self.tiers.wake()

    def keep(self, segment: Segment, tenant: str) -> None:
        """Copy a complete document to the tiers. It is not evicted before the copy has ended."""
        if self.tiers is None or segment.forgotten:
            return
        self._tell_read()
        # held before the copy starts: an interrupt must not leave a copy of reused pages
        self.store.hold(segment)
        copied = None
        try:
            copied = self._keep(segment, tenant, packed=True)
            if copied is not None:
                self.leaving.append(Leaving(segment, tenant, copied))
        finally:
            if copied is None:
                self.store.release(segment)
        if self.claims is not None:
            self.tiers.when_written(partial(self.claims.stored, segment.key))

    def release_pages(self) -> bool:
        """Wait for all copies to the tiers; returns whether this released any segment."""
        releases = bool(self.leaving)
        while self.leaving:
            for leaving in self.leaving:
                leaving.copied.wait()
            self._let_go()
        return releases

    def _let_go(self) -> None:
        staying, finished = [], self._finished()
        for leaving, is_finished in zip(self.leaving, finished, strict=True):
            if is_finished:
                again = None
                if not leaving.copied.is_valid and not leaving.segment.forgotten:
                    again = self._keep(leaving.segment, leaving.tenant, packed=False)
                if again is None:
                    self.store.release(leaving.segment)
                else:
                    staying.append(replace(leaving, copied=again))
            else:
                staying.append(leaving)
        self.leaving = staying

    def _finished(self) -> list[bool]:
        """Whether the copy of each leaving segment has ended."""
        return [leaving.copied.is_finished for leaving in self.leaving]

    def _keep(self, segment: Segment, tenant: str, *, packed: bool) -> PageExport | None:
        """The copy of a segment to the tiers; None if its pages need not wait for the copy."""
        assert self.tiers is not None
        target = PagedSegment(segment.key, segment.length, segment.pages)
        copied = self.tiers.write_back(target, tenant, packed=packed)
        complete = copied is None or (copied.is_finished and copied.is_valid)
        return None if complete else copied

    def _is_hurried(self) -> bool:
        return self.hurry() or self.deadlines.is_over(time.perf_counter())

    def _target(self, use: DocumentUse) -> PagedSegment:
        segment = use.segment
        assert segment is not None
        return PagedSegment(segment.key, segment.length, segment.pages)
