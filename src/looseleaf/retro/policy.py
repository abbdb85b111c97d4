"""Revision as a policy: the newest row of an output chooses, past rows read its unseen pages.

`Revising` wraps a page-choosing policy. A step has the newest row of each output first, then past
rows. The base policy chooses for the newest rows only. A past row gets the same pages except those
that it has read, continues from its cached state, and stores the result. Unsealed pages are read
anew in every step. With ``local="stale"`` only the newest row reads them and caches them like other
pages, which is the paper's literal rule.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from looseleaf.attention.select.policy import (
    Candidates,
    Choice,
    PagePolicy,
    SelectingRow,
    Worth,
)
from looseleaf.config import Local
from looseleaf.kv.summaries import Summary
from looseleaf.retro.seen import mark_read, unseen
from looseleaf.retro.states import RevisionStates, revised
from looseleaf.types import AttnState


@dataclass(frozen=True)
class _Step:
    """The rows of one step as tensors; ``owner[row]`` is the newest row of its output."""

    newest: Candidates
    owner: Int[Tensor, " rows"]
    ages: Int[Tensor, " rows"]
    slots: Int[Tensor, " rows"]
    indices: Int[Tensor, " rows"]
    taken_over: Int[Tensor, "outputs new"]  # -1 where there is none


class Revising(PagePolicy):
    """A policy over ``base``; a row's state is a `RevisedRow`, ``kept`` is the cache."""

    def __init__(self, base: PagePolicy, kept: RevisionStates, local: Local = "exact") -> None:
        self.base = base
        self._states = kept
        self.local = local
        self._made: tuple[Candidates, _Step] | None = None

    @property
    def dense_layers(self) -> Container[int]:
        """The base's: in these layers all rows of the window read all pages."""
        return self.base.dense_layers

    @property
    def summary(self) -> Summary | None:
        return self.base.summary

    @property
    def listed_budget(self) -> tuple[int, int] | None:
        """The base's; None for "stale" revision, which device lists do not support."""
        return None if self.local == "stale" else self.base.listed_budget

    @property
    def worth(self) -> Worth | None:
        return self.base.worth

    @property
    def kept(self) -> RevisionStates:
        """The states of past rows."""
        return self._states

    def num_leading(self, rows: Sequence[SelectingRow]) -> int:
        """The number of newest rows."""
        return sum(revised(row).age == 0 for row in rows)

    def limit(self, num_candidates: int, num_other: int) -> int:
        """The base's; taken-over pages come on top of it."""
        return self.base.limit(num_candidates, num_other)

    def layer_limits(self, num_candidates: int, num_other: int, num_layers: int) -> Sequence[int]:
        return self.base.layer_limits(num_candidates, num_other, num_layers)

    def choose(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Choice:
        """The pages of each row: RetroAttention over sealed pages."""
        step, states = self._step(candidates), self.kept
        outputs = len(step.newest.rows)
        chosen = self.base.choose(layer, q[:outputs], step.newest)
        assert chosen.join is None and chosen.on_merged is None, "the base policy reads pages only"
        column = torch.arange(chosen.ordinals.shape[-1], device=q.device)
        ordinals, valid = chosen.ordinals, column < chosen.counts[..., None]
        slots = step.slots[:outputs]
        registers = states.registers[layer, slots]
        # a repeated step reads nothing new
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
            # the newest row's cached state covers more than the joined pages, so it starts anew
            again, repeated = torch.zeros_like(again), repeated & (step.ages > 0)
        new = valid[step.owner] & unseen(known[step.owner], step.ages + repeated)
        read, counts = _ascending(ordinals[step.owner], new, candidates.table.pages.shape[1])

        def carried() -> AttnState:
            state = states.carried(layer, step.slots, step.indices)
            # the newest row reuses the index of the row that left the window
            state.lse[:outputs].masked_fill_(~again[:, None], -torch.inf)
            state.out[:outputs].masked_fill_(~again[:, None, None], 0.0)
            return state

        def keep(state: AttnState) -> None:
            states.keep(layer, step.slots, step.indices, state.out, state.lse)

        return Choice(read, counts, carried, keep, include_rest=self.local == "stale")

    def _step(self, candidates: Candidates) -> _Step:
        """The tensors that a step's layers share."""
        if self._made is None or self._made[0] is not candidates:
            self.kept.make_room(candidates.table.pages.shape[1])
            self._made = candidates, _read_step(candidates)
        return self._made[1]


def _read_step(candidates: Candidates) -> _Step:
    rows = [revised(row) for row in candidates.rows]
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


def _with_taken_over(
    ordinals: Int[Tensor, "outputs kv_heads chosen"],
    valid: Bool[Tensor, "outputs kv_heads chosen"],
    taken_over: Int[Tensor, "outputs new"],
) -> tuple[Tensor, Tensor]:
    """The choice and the taken-over pages, each page once."""
    pages = taken_over[:, None].expand(-1, ordinals.shape[1], -1)
    present = ((ordinals[..., None] == pages[:, :, None]) & valid[..., None]).any(2)
    joined = torch.cat([ordinals, pages.clamp_min(0)], -1)
    return joined, torch.cat([valid, (pages >= 0) & ~present], -1)


def _with_read_before(
    registers: UInt8[Tensor, "outputs kv_heads pages"],
    pages: Int[Tensor, "outputs new"],
    again: Bool[Tensor, " outputs"],
) -> UInt8[Tensor, "outputs kv_heads pages"]:
    """The registers, with newly sealed pages marked as read: all rows of the window read them while
    they were open. A repeated step marks nothing."""
    each = pages[:, None].expand(-1, registers.shape[1], -1)
    before = _mask(registers, each.clamp_min(0), each >= 0) & ~again[:, None, None]
    return registers.masked_fill(before, 255)


def _mask(
    registers: Tensor,
    ordinals: Int[Tensor, "outputs kv_heads chosen"],
    valid: Bool[Tensor, "outputs kv_heads chosen"],
) -> Bool[Tensor, "outputs kv_heads pages"]:
    """Mask of the registers' pages that are valid ordinals."""
    pages = registers.shape[-1]
    columns = torch.zeros(*registers.shape[:-1], pages + 1, dtype=torch.bool, device=valid.device)
    # invalid ordinals mark an extra column
    columns.scatter_(-1, ordinals.masked_fill(~valid, pages), True)
    return columns[..., :pages]


def _ascending(
    ordinals: Int[Tensor, "rows kv_heads chosen"],
    new: Bool[Tensor, "rows kv_heads chosen"],
    past: int,
) -> tuple[Tensor, Tensor]:
    """The new ordinals first, ascending, and their number."""
    counts = new.sum(-1)
    ranked = ordinals.masked_fill(~new, past).sort(-1).values
    return ranked.clamp_max(past - 1), counts
