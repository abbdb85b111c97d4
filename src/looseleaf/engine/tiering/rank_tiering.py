"""Tiering of several ranks, each of which loads and stores the keys of its own heads.

A document loads if every rank has it, and has arrived when it has arrived on every rank. Rank 0
chooses tiers and budgets by its own measurements."""

from dataclasses import dataclass, replace

from looseleaf.config import Fuse
from looseleaf.engine.sequence import Sequence
from looseleaf.engine.tiering.tiering import Leaving, Tiering
from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.store import Segment
from looseleaf.parallel import Link
from looseleaf.prompt.placements import DocumentUse
from looseleaf.tiers import LoadState, PageExport


@dataclass(eq=False)
class RankTiering(Tiering):
    """The tiering of one rank. Steps do not wait for loads layer by layer, where a load that fails
    on one rank would leave the others waiting."""

    layerwise: bool = False

    @property
    def link(self) -> Link:
        """The messages between the ranks."""
        assert self.ranks is not None, "a rank has ranks beside it"
        return self.ranks.link

    def balance(self, fuse: Fuse, sequence: Sequence) -> tuple[Fuse, float] | None:
        # the first measurement is a pass of all ranks
        self.measured_compute_time()
        balance = super().balance
        return self.link.decide("balance", lambda: balance(fuse, sequence))

    def _find(self, keys: list[SegmentKey]) -> dict[SegmentKey, list[str]]:
        holders = super()._find(keys)
        own = [holders.get(key, []) for key in keys]
        common = self.link.agree("holders", own, _common_names)
        return {key: names for key, names in zip(keys, common, strict=True) if names}

    def _choose(
        self,
        sequence: Sequence,
        stored: list[DocumentUse],
        holders: dict[SegmentKey, list[str]],
    ) -> dict[SegmentKey, str]:
        if not stored:
            return {}
        choose = super()._choose
        chosen = self.link.decide("tiers", lambda: choose(sequence, stored, holders))
        for use in stored:
            use.tier = chosen.get(use.key)
        return chosen

    def _states(self) -> list[LoadState]:
        own = super()._states()
        return self.link.agree("loads", own, _common_states) if own else own

    def _finished(self) -> list[bool]:
        self.leaving = [self._renewed(leaving) for leaving in self.leaving]
        own = super()._finished()
        return self.link.agree("copies", own, _all_of) if own else own

    def _renewed(self, leaving: Leaving) -> Leaving:
        """``leaving``, copied again if its copy has ended without the segment."""
        copied = leaving.copied
        if not copied.is_finished or copied.is_valid:
            return leaving
        again = PageExport()
        if not leaving.segment.forgotten:
            again = self._keep(leaving.segment, leaving.tenant, packed=False)
        return replace(leaving, copied=again)

    def _keep(self, segment: Segment, tenant: str, *, packed: bool) -> PageExport:
        # pages become free on all ranks in the same step
        return super()._keep(segment, tenant, packed=packed) or PageExport()


def _common_names(ranks: list[list[list[str]]]) -> list[list[str]]:
    """For each document the tiers that hold it on every rank, in the order of rank 0."""
    return [
        [name for name in names if all(name in rank[n] for rank in ranks)]
        for n, names in enumerate(ranks[0])
    ]


def _common_states(ranks: list[list[LoadState]]) -> list[LoadState]:
    """The state of each load on all ranks together: failed only after all have ended."""
    order: tuple[LoadState, ...] = ("loading", "cancelled", "failed", "done")
    return [min(states, key=order.index) for states in zip(*ranks, strict=True)]


def _all_of(ranks: list[list[bool]]) -> list[bool]:
    return [all(values) for values in zip(*ranks, strict=True)]
