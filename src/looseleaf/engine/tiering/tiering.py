"""Documents that come from a tier and go to one: what the engine does about them between two steps.

A document that is missing from the pool gets its pages as ever; if a tier has it and is expected to
be quicker than computing it, it is *arriving* instead of owned. Whoever reads it waits as for one
that is being computed; only when there is nothing else to do, a step follows close behind, layer by
layer. One that fails to arrive is computed by who waits for it."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from looseleaf.config import Fuse
from looseleaf.engine.deadlines import Deadlines
from looseleaf.engine.sequence import Sequence
from looseleaf.engine.tiering.compute_time import ComputePace
from looseleaf.engine.tiering.load_controller import LoadingController, timed
from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.store import Segment, SegmentStore
from looseleaf.prompt.placements import DocumentUse
from looseleaf.tiers import Load, PagedSegment, PageExport, Tiers


@dataclass(frozen=True, eq=False)
class Leaving:
    """A segment on its way out of the pool, held until it is out, and whose it is."""

    segment: Segment
    tenant: str
    copied: PageExport


@dataclass(eq=False)
class Tiering:
    """The tiers of one engine as its scheduler sees them; without tiers nothing ever arrives.

    ``measured_pace`` tells how fast the model computes, and measures it if nobody has. A step that
    waits for what arrives goes no further when ``hurry`` says that something is asked of the engine
    or one of the ``deadlines`` has passed: what it was to compute comes later. ``arriving`` and
    ``leaving`` are the segments on their way into the pool and out of it."""

    store: SegmentStore
    tiers: Tiers | None = None
    controller: LoadingController | None = None
    measured_pace: Callable[[], ComputePace] = ComputePace
    hurry: Callable[[], bool] = lambda: False
    deadlines: Deadlines = field(default_factory=Deadlines)
    arriving: dict[Segment, Load] = field(default_factory=dict)
    leaving: list[Leaving] = field(default_factory=list)
    # what was read from the pool since something came to the tiers
    _read: set[SegmentKey] = field(default_factory=set)

    def close(self) -> None:
        """Finish writing, and let go of the tiers."""
        if self.tiers is not None:
            self._tell_read()
            self.tiers.close()

    def begin(self, sequence: Sequence, missing: Iterable[DocumentUse]) -> set[SegmentKey]:
        """Have documents that have pages now brought from the tiers, those that are there and
        worth it; returns their keys. The others are to be computed."""
        uses = {use.key: use for use in missing if use.num_tokens}
        if self.tiers is None or self.controller is None or not uses:
            return set()
        found = self.tiers.find(list(uses))
        chosen = self.controller.choose(sequence, [u for k, u in uses.items() if k in found], found)
        for tier in dict.fromkeys(chosen.values()):
            wanted = [self._wanted(uses[key]) for key, name in chosen.items() if name == tier]
            for load in self.tiers.load(wanted, tier):
                segment = uses[load.record.key].segment
                assert segment is not None
                segment.arriving = load
                load.hurry = self._is_hurried
                self.arriving[segment] = load
                if sequence.arrivals is not None:
                    sequence.arrivals.loads.append(load)
        return set(chosen)

    def balance(self, fuse: Fuse, sequence: Sequence) -> tuple[Fuse, float] | None:
        """A policy that is balanced, or whose budget is a time, as it is now, for a sequence that
        blends nothing yet, and the share of tokens that it computes again; None for another, and
        for a balanced one without tiers."""
        if fuse.seconds is not None:
            return timed(fuse, sequence, self.measured_pace())
        if not fuse.balanced:
            return None
        if self.tiers is None or self.controller is None:
            return None
        missing = [u.key for u in sequence.documents if self.store.find(u.key) is None]
        return self.controller.balance(fuse, sequence, self.tiers.find(missing))

    def note_read(self, key: SegmentKey) -> None:
        """A document was read from the pool: the tiers, which see nothing of it, hear of it before
        the next one comes to them, since one that is asked for again makes room for no other."""
        if self.tiers is not None:
            self._read.add(key)

    def _tell_read(self) -> None:
        if self.tiers is not None and self._read:
            self.tiers.touch(list(self._read))
            self._read.clear()

    def settle(self) -> list[tuple[Segment, bool]]:
        """Segments that have ended to arrive, and whether they are there; and let go of those that
        are out."""
        self._let_go()
        ended = []
        for segment, load in list(self.arriving.items()):
            state = load.state
            if state == "loading":
                continue
            del self.arriving[segment]
            if state != "cancelled":
                # of one that is done the last layer has come, as its state says
                if state == "failed":
                    load.settle()
                segment.arriving = None
                ended.append((segment, state == "done"))
        return ended

    def wait(self, seconds: float) -> None:
        """Wait until one of those that arrive has ended, for that long at most."""
        self.wake()
        for load in list(self.arriving.values())[:1]:
            load.wait_for_end(seconds)

    def wake(self) -> None:
        """Have what arrives go on: to be called behind every launch."""
        if self.tiers is not None and self.arriving:
            self.tiers.wake()

    def keep(self, segment: Segment, tenant: str) -> None:
        """Bring a document that is ready now to the tiers; it is not evicted meanwhile."""
        if self.tiers is None or segment.forgotten:
            return
        self._tell_read()
        # held before anything of it is on its way: whoever is interrupted in between leaves no copy
        # of pages that are somebody else's by then
        self.store.acquire(segment)
        copied = None
        try:
            copied = self._keep(segment, tenant, packed=True)
            if copied is not None:
                self.leaving.append(Leaving(segment, tenant, copied))
        finally:
            if copied is None:
                self.store.release(segment)

    def release_pages(self) -> bool:
        """Wait for all that is leaving the pool; whether that lets go of any page."""
        held = bool(self.leaving)
        while self.leaving:
            for leaving in self.leaving:
                leaving.copied.wait()
            self._let_go()
        return held

    def _let_go(self) -> None:
        staying = []
        for leaving in self.leaving:
            if leaving.copied.is_finished:
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

    def _keep(self, segment: Segment, tenant: str, *, packed: bool) -> PageExport | None:
        """What becomes of a segment that is brought to the tiers; None if its pages need not wait
        for that."""
        assert self.tiers is not None
        wanted = PagedSegment(segment.key, segment.length, segment.pages)
        copied = self.tiers.write_back(wanted, tenant, packed=packed)
        done = copied is None or (copied.is_finished and copied.is_valid)
        return None if done else copied

    def _is_hurried(self) -> bool:
        return self.hurry() or self.deadlines.is_over(time.perf_counter())

    def _wanted(self, use: DocumentUse) -> PagedSegment:
        segment = use.segment
        assert segment is not None
        return PagedSegment(segment.key, segment.length, segment.pages)
