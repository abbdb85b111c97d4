"""The revision of one output (RetroAttention): the rows of its window, step by step.

The newest row of an output chooses what is read. It and the rows before it, as far as they are in
the window, are rows of the step like any other, each at its own position; their keys and values go
where they went before. What rows keep between steps lives in `RevisionStates`, in a slot of the
output."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from looseleaf.attention.groups import DecodeRow, ReadSpan
from looseleaf.attention.selection import PagePolicy, SelectingRow
from looseleaf.config import Revise
from looseleaf.errors import InvalidOption
from looseleaf.models import Decoder
from looseleaf.retro import (
    Exposure,
    RevisedRow,
    Revising,
    RevisionStates,
    StateShape,
    Window,
    free_rows,
    window_for,
)


@dataclass(eq=False)
class Revision:
    """One output's window; its slot is held while the output decodes. ``free_rows`` is how many
    rows a step may have before an adaptive window falls.
    """

    revise: Revise
    policy: Revising
    page_size: int
    free_rows: int
    window: Window = field(default_factory=Window)
    exposure: Exposure = field(default_factory=Exposure)
    _slot: int | None = None
    _num_sealed: int = 0
    _trimmed: list[int] = field(default_factory=list)

    def rows(self, newest: DecodeRow, num_outputs: int, num_new_rows: int) -> list[DecodeRow]:
        """The rows of a step, the newest first: ``newest`` as it would be without revision.

        Where the newest row reads everything, or a window falls to one row, nothing is revised, and
        nothing kept."""
        width = self.revise.window
        if self.revise.adaptive:
            width = window_for(width, num_outputs, self.free_rows - num_new_rows)
        if width == 1 or not isinstance(newest, SelectingRow):
            self.restart()
            return [newest]
        tail, window = newest.tail, self.window
        window.advance(newest.position, width, tail.offset, self.page_size)
        first = self._row(newest, 0)
        self._num_sealed = most = first.num_candidates
        if self.policy.limit(most, first.num_other(self.page_size)) >= most:
            self.restart()
            return [DecodeRow(newest.position, newest.settled, tail)]
        return [first, *(self._row(newest, age) for age in range(1, window.num_rows))]

    def book(self) -> None:
        """Count what the step has read."""
        if self._slot is not None and self.window.num_past >= 0:
            self.exposure.book(self.policy.states.registers[:, self._slot], self._num_sealed)

    def restart(self) -> None:
        """Nothing is kept of the rows so far."""
        self.window.restart()
        self.exposure.restart()
        self._trimmed = []

    def release(self) -> None:
        """Give the slot back: the output has ended, or starts over."""
        self.restart()
        if self._slot is not None:
            self.policy.states.free(self._slot)
            self._slot = None

    def _row(self, newest: SelectingRow, age: int) -> SelectingRow:
        """The row ``age`` before the newest."""
        if self._slot is None:
            self._slot = self.policy.states.take()
        window, position = self.window, newest.position - age
        place = position % self.policy.states.window
        newly_sealed = window.newly_sealed if age == 0 else 0
        state = RevisedRow(self._slot, place, age, newly_sealed)
        length = newest.tail.length - age
        # where rows read everything, those of a window read what is final together
        tail = replace(
            newest.tail,
            pages=self._pages(newest.tail, length),
            length=length,
            sharable=max(newest.tail.sharable, window.sealed),
        )
        return SelectingRow(position, newest.settled, tail, self.policy, window.sealed, state)

    def _pages(self, tail: ReadSpan, length: int) -> Sequence[int]:
        """The pages that ``length`` keys of the tail stand in: the same object as long as it is the
        same pages, by which rows are known from step to step.
        """
        count = -(-length // self.page_size)
        if count == len(tail.pages):
            return tail.pages
        if len(self._trimmed) != count:
            self._trimmed = list(tail.pages[:count])
        return self._trimmed


@dataclass
class Revisions:
    """Makes the revisions of one engine; outputs with the same policies are computed together."""

    shape: StateShape
    page_size: int
    free_rows: int
    batch_invariant: bool = False
    _states: dict[int, RevisionStates] = field(default_factory=dict)
    # as long as an output has it
    _policies: WeakValueDictionary[tuple[PagePolicy, int], Revising] = field(
        default_factory=WeakValueDictionary
    )

    @classmethod
    def of(cls, model: Decoder, page_size: int, batch_invariant: bool) -> "Revisions":
        """For outputs of ``model``, which may be promised not to depend on their batch."""
        config = model.config
        shape = StateShape(
            config.num_layers,
            config.num_qo_heads,
            config.num_kv_heads,
            config.head_dim,
            model.device,
        )
        free = free_rows(model.device, model.dtype.itemsize)
        return cls(shape, page_size, free, batch_invariant)

    def revision(self, revise: Revise, base: PagePolicy | None) -> Revision | None:
        """The revision of a new output under ``base``; None if there is nothing to revise. Raises
        InvalidOption for a window that depends on the batch where answers must not.
        """
        if revise.adaptive and self.batch_invariant:
            raise InvalidOption(
                "an adaptive window depends on what else the engine does, and batch_invariant "
                "promises that answers do not: leave one of them out"
            )
        if revise.window == 1 or base is None:
            return None
        window = revise.window
        policy = self._policies.get((base, window))
        if policy is None:
            policy = self._policies[base, window] = Revising(base, self.states(window))
        return Revision(revise, policy, self.page_size, self.free_rows)

    def states(self, window: int) -> RevisionStates:
        """What outputs with this window keep."""
        if window not in self._states:
            self._states[window] = RevisionStates(self.shape, window)
        return self._states[window]
