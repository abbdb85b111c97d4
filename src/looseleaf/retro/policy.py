"""Revision as a policy: the newest row of an output chooses, past rows read what is new to them.

Wraps a policy that chooses pages. Of the rows of a step the newest come first, one an output, then
past rows. The base is asked for the newest only; a past row gets the same pages less those that it
has read, starts from what it has kept, and keeps what comes out. What rows read in any case, pages
that are not sealed, is no part of it; or, where ``local`` is "stale", is read by the newest row
only, which keeps it like everything else, as the paper says literally.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from looseleaf.attention.select.candidates import Candidates, Choice, PagePolicy, SelectingRow
from looseleaf.config import Local
from looseleaf.kv.summaries import Summary
from looseleaf.retro.seen import mark_read, unseen
from looseleaf.retro.states import RevisionStates
from looseleaf.types import AttnState


@dataclass(frozen=True)
class RevisedRow:
    """What `Revising` must know of a row: its output's slot, the place of its state, and its age, 0
    for the newest. ``newly_sealed`` are how many of the last candidates past rows must take over.
    """

    slot: int
    place: int
    age: int
    newly_sealed: int = 0


@dataclass(frozen=True)
class _Step:
    """The rows of one step as tensors; ``owner[row]`` is the newest row of its output."""

    newest: Candidates
    owner: Int[Tensor, " rows"]
    ages: Int[Tensor, " rows"]
    slots: Int[Tensor, " rows"]
    places: Int[Tensor, " rows"]
    taken_over: Int[Tensor, "outputs new"]  # -1 where there is none


class Revising:
    """A `PagePolicy` over ``base``; its rows carry a `RevisedRow`, ``states`` what they keep."""

    def __init__(self, base: PagePolicy, states: RevisionStates, local: Local = "exact") -> None:
        self.base = base
        self.states = states
        self.local = local
        self._made: tuple[Candidates, _Step] | None = None

    @property
    def dense_layers(self) -> Container[int]:
        """The base's: there all rows of the window read everything."""
        return self.base.dense_layers

    @property
    def summary(self) -> Summary | None:
        return self.base.summary

    @property
    def listed_budget(self) -> tuple[int, int] | None:
        """The base's, if it has any: see `SparsePolicy.listed_budget`. None if rows keep all that
        they read, which no work list tells."""
        if self.local == "stale":
            return None
        budget: tuple[int, int] | None = getattr(self.base, "listed_budget", None)
        return budget

    @property
    def worth(self) -> object:
        return getattr(self.base, "worth", None)

    @property
    def window(self) -> int:
        """The most rows of an output."""
        return self.states.window

    def num_leading(self, rows: Sequence[SelectingRow]) -> int:
        """The newest rows."""
        return sum(_revised(row.state).age == 0 for row in rows)

    def limit(self, num_candidates: int, num_other: int) -> int:
        """The base's; pages that are taken over come on top of it."""
        return self.base.limit(num_candidates, num_other)

    def layer_limits(self, num_candidates: int, num_other: int, num_layers: int) -> Sequence[int]:
        return self.base.layer_limits(num_candidates, num_other, num_layers)

    def choose(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Choice:
        """What each row reads: RetroAttention over sealed pages."""
        step, states = self._step(candidates), self.states
        outputs = len(step.newest.rows)
        chosen = self.base.choose(layer, q[:outputs], step.newest)
        assert chosen.join is None and chosen.done is None, "the base reads pages and nothing else"
        column = torch.arange(chosen.ordinals.shape[-1], device=q.device)
        ordinals, valid = chosen.ordinals, column < chosen.counts[..., None]
        slots = step.slots[:outputs]
        registers = states.registers[layer, slots]
        # a step that was computed in vain reads nothing new when it is made again
        again = states.booked[layer, slots, 0] == step.newest.row_positions
        if step.taken_over.shape[1] and self.local == "exact":
            ordinals, valid = _with_taken_over(ordinals, valid, step.taken_over)
        elif step.taken_over.shape[1]:
            registers = _with_read_before(registers, step.taken_over, again)
        states.booked[layer, slots] = step.newest.row_positions[:, None]
        marked = mark_read(registers, _mask(registers, ordinals, valid))
        states.registers[layer, slots] = torch.where(again[:, None, None], registers, marked)
        known = registers.gather(-1, ordinals)
        repeated = again[step.owner]
        if self.local == "stale":
            # what its newest row keeps holds more than what is joined: it begins anew
            again, repeated = torch.zeros_like(again), repeated & (step.ages > 0)
        new = valid[step.owner] & unseen(known[step.owner], step.ages + repeated)
        read, counts = _rising(ordinals[step.owner], new, candidates.table.pages.shape[1])

        def carried() -> AttnState:
            state = states.carried(layer, step.slots, step.places)
            # the newest row takes the place of the one that left the window
            state.lse[:outputs].masked_fill_(~again[:, None], -torch.inf)
            state.out[:outputs].masked_fill_(~again[:, None, None], 0.0)
            return state

        def keep(state: AttnState) -> None:
            states.keep(layer, step.slots, step.places, state.out, state.lse)

        return Choice(read, counts, carried, keep, told_all=self.local == "stale")

    def _step(self, candidates: Candidates) -> _Step:
        """What the layers of a step have in common."""
        if self._made is None or self._made[0] is not candidates:
            self.states.make_room(candidates.table.pages.shape[1])
            self._made = candidates, _read_step(candidates)
        return self._made[1]


def _read_step(candidates: Candidates) -> _Step:
    rows = [_revised(row.state) for row in candidates.rows]
    newest = {row.slot: index for index, row in enumerate(rows) if row.age == 0}
    assert list(newest.values()) == list(range(len(newest))), "the newest rows come first"
    device = candidates.row_positions.device
    most_new = max(row.newly_sealed for row in rows)
    taken_over = torch.full((len(newest), most_new), -1, dtype=torch.int64)
    for index, row in enumerate(rows[: len(newest)]):
        end = candidates.rows[index].num_candidates
        taken_over[index, : row.newly_sealed] = torch.arange(end - row.newly_sealed, end)

    def on_device(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device)

    return _Step(
        candidates.first(len(newest)),
        on_device([newest[row.slot] for row in rows]),
        on_device([row.age for row in rows]),
        on_device([row.slot for row in rows]),
        on_device([row.place for row in rows]),
        taken_over.to(device),
    )


def _revised(state: object) -> RevisedRow:
    assert isinstance(state, RevisedRow), "rows that are revised say so"
    return state


def _with_taken_over(
    ordinals: Int[Tensor, "outputs kv_heads chosen"],
    valid: Bool[Tensor, "outputs kv_heads chosen"],
    taken_over: Int[Tensor, "outputs new"],
) -> tuple[Tensor, Tensor]:
    """The choice with the pages that are taken over, each once."""
    more = taken_over[:, None].expand(-1, ordinals.shape[1], -1)
    there = ((ordinals[..., None] == more[:, :, None]) & valid[..., None]).any(2)
    joined = torch.cat([ordinals, more.clamp_min(0)], -1)
    return joined, torch.cat([valid, (more >= 0) & ~there], -1)


def _with_read_before(
    registers: UInt8[Tensor, "outputs kv_heads pages"],
    pages: Int[Tensor, "outputs new"],
    again: Bool[Tensor, " outputs"],
) -> UInt8[Tensor, "outputs kv_heads pages"]:
    """The registers of pages that are sealed now, which all rows of the window read when they were
    not; unless the step is made again."""
    each = pages[:, None].expand(-1, registers.shape[1], -1)
    before = _mask(registers, each.clamp_min(0), each >= 0) & ~again[:, None, None]
    return registers.masked_fill(before, 255)


def _mask(
    registers: Tensor,
    ordinals: Int[Tensor, "outputs kv_heads chosen"],
    valid: Bool[Tensor, "outputs kv_heads chosen"],
) -> Bool[Tensor, "outputs kv_heads pages"]:
    """Which pages of the registers are among the valid ordinals."""
    pages = registers.shape[-1]
    places = torch.zeros(*registers.shape[:-1], pages + 1, dtype=torch.bool, device=valid.device)
    # what is not valid goes to a place of its own
    places.scatter_(-1, ordinals.masked_fill(~valid, pages), True)
    return places[..., :pages]


def _rising(
    ordinals: Int[Tensor, "rows kv_heads chosen"],
    new: Bool[Tensor, "rows kv_heads chosen"],
    past: int,
) -> tuple[Tensor, Tensor]:
    """The new ordinals in front, rising, and how many they are."""
    counts = new.sum(-1)
    ranked = ordinals.masked_fill(~new, past).sort(-1).values
    return ranked.clamp_max(past - 1), counts
