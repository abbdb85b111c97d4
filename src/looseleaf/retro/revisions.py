"""Revision of outputs whose rows choose pages, and the factory of an engine's revisions.

`RevisionStates` has the states of pages, in a slot per output. States over host-resident documents
belong to each output (`looseleaf.retro.key_revision`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.groups import DecodeRow
from looseleaf.attention.select.policy import PagePolicy, RevisedRow, SelectingRow
from looseleaf.config import Local, Revise
from looseleaf.errors import InvalidOption, InvalidRequest, NativeUnavailable
from looseleaf.index.host.window import WindowShape
from looseleaf.models import Decoder
from looseleaf.ops.native.c_compiler import find_compiler
from looseleaf.retro import Exposure, Revising, RevisionStates, StateShape, free_rows
from looseleaf.retro.key_revision import KeyRevision
from looseleaf.retro.revision import Revision


@dataclass(eq=False)
class PageRevision(Revision):
    """Revision of an output whose newest row chooses pages; it occupies a slot of the states while
    it decodes."""

    policy: Revising
    exposure: Exposure = field(default_factory=Exposure)
    _slot: int | None = None
    _num_sealed: int = 0

    def window_rows(self, newest: DecodeRow, width: int) -> list[DecodeRow]:
        if width == 1 or not isinstance(newest, SelectingRow):
            self.restart()
            return [newest]
        tail, window = newest.tail, self.window
        window.advance(newest.position, width, tail.offset, self.page_size)
        first = self._row(newest, 0)
        self._num_sealed = most = first.num_candidates
        limit = self.policy.limit(most, first.num_other(self.page_size))
        if limit >= most and not self.policy.counts_on_device:
            self.restart()
            return [DecodeRow(newest.position, newest.settled, tail)]
        return [first, *(self._row(newest, age) for age in range(1, window.num_rows))]

    def launched(self) -> None:
        if self._slot is not None and self.window.num_past >= 0:
            self.exposure.book(self.policy.kept.registers[:, self._slot], self._num_sealed)

    def counts(self) -> list[int]:
        """Pages, see `Exposure.totals`."""
        return self.exposure.totals()

    def restart(self) -> None:
        super().restart()
        self.exposure.restart()

    def reset(self) -> None:
        """As `Revision.reset`; frees the slot."""
        self.restart()
        if self._slot is not None:
            self.policy.kept.free(self._slot)
            self._slot = None

    def _row(self, newest: SelectingRow, age: int) -> SelectingRow:
        """The row ``age`` before the newest."""
        if self._slot is None:
            self._slot = self.policy.kept.take()
        window, position = self.window, newest.position - age
        index = position % self.policy.kept.window
        newly_sealed = window.newly_sealed if age == 0 else 0
        state = RevisedRow(self._slot, index, age, newly_sealed)
        tail = self.tail(newest.tail, age)
        # the cached state of a stale row covers its open pages
        rest = age == 0 or self.revise.local == "exact"
        measured = age == 0 and newest.measured
        return SelectingRow(
            position, newest.settled, tail, self.policy, window.sealed, state, measured, rest
        )


@dataclass
class Revisions:
    """Makes the revisions of one engine; outputs with equal policies share an object, so they are
    computed together. ``settle`` waits for reads of host-resident documents in flight."""

    shape: StateShape
    page_size: int
    free_rows: int
    settle: Callable[[], None]
    batch_invariant: bool = False
    _states: dict[int, RevisionStates] = field(default_factory=dict)
    # entries live as long as an output uses them
    _policies: WeakValueDictionary[tuple[PagePolicy, int, Local], Revising] = field(
        default_factory=WeakValueDictionary
    )

    @classmethod
    def of(
        cls, model: Decoder, attention: PagedAttention, page_size: int, batch_invariant: bool
    ) -> "Revisions":
        """For outputs of ``model``; ``batch_invariant`` refuses adaptive windows."""
        config = model.config
        shape = StateShape(
            config.num_layers,
            config.num_qo_heads,
            config.num_kv_heads,
            config.head_dim,
            model.device,
        )
        free = free_rows(model.device, model.dtype.itemsize)
        return cls(shape, page_size, free, attention.settle, batch_invariant)

    def revision(self, revise: Revise, base: PagePolicy | None) -> Revision | None:
        """The revision of a new output under ``base``; None if there is nothing to revise. Raises
        InvalidOption for an adaptive window with ``batch_invariant``.
        """
        self._require_steady(revise)
        if revise.window == 1 or base is None:
            return None
        window, local = revise.window, revise.local
        policy = self._policies.get((base, window, local))
        if policy is None:
            policy = Revising(base, self.states(window), local)
            self._policies[base, window, local] = policy
        return PageRevision(revise, self.page_size, self.free_rows, policy)

    def hosted(self, revise: Revise) -> Revision | None:
        """The revision of a new output with indexed reads of host-resident documents; None for a
        window of one row. Raises as `revision`, and InvalidRequest for "stale" or without a C
        compiler.
        """
        self._require_steady(revise)
        if revise.window == 1:
            return None
        if revise.local == "stale":
            raise InvalidRequest(
                "local='stale' is about pages that a policy could choose later, and "
                "select='retrieval' chooses none: leave local out"
            )
        try:
            find_compiler()
        except NativeUnavailable as error:
            raise InvalidRequest(
                "revise beside select='retrieval' takes a C compiler: install gcc or clang, or "
                "leave revise out",
                "revise",
                "select",
            ) from error
        shape = WindowShape(self.shape.num_layers, self.shape.num_qo_heads, self.shape.head_dim)
        return KeyRevision(revise, self.page_size, self.free_rows, shape, self.settle)

    def _require_steady(self, revise: Revise) -> None:
        if revise.adaptive and self.batch_invariant:
            raise InvalidOption(
                "an adaptive window depends on what else the engine does, and batch_invariant "
                "promises that answers do not: leave one of them out"
            )

    def states(self, window: int) -> RevisionStates:
        """The states of outputs with this window."""
        if window not in self._states:
            self._states[window] = RevisionStates(self.shape, window)
        return self._states[window]
