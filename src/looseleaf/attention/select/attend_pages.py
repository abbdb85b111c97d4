"""Attention of rows over the pages that they choose: each row and KV head reads its own pages.

The tensor operations have the same shapes in every layer, on any device; no loop runs over rows,
heads or pages. The result is one state a row, which joins the merge of the row's other states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looseleaf.attention.select.policy import Candidates, Choice, PagePolicy
from looseleaf.index.host.attend import merge_all
from looseleaf.types import AttnState


def attend_chosen(
    layer: int,
    q: Float[Tensor, "rows qo_heads head_dim"],
    choice: Choice,
    candidates: Candidates,
) -> AttnState:
    """The state of each row over its chosen pages: fp32, ``(0, -inf)`` for a row without any."""
    _, v_pages = candidates.pool.layer(layer)
    heads = candidates.num_kv_heads
    row = torch.arange(len(q), device=q.device)[:, None, None]
    head = torch.arange(heads, device=q.device)[None, :, None]
    values = v_pages[candidates.table.pages[row, choice.ordinals], head].float()
    # the chosen pages of a head are one run of keys
    flat = key_scores(layer, q, choice, candidates).transpose(2, 3).flatten(3)
    lse = flat.logsumexp(-1)  # [rows, kv_heads, group]
    weights = (flat - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = weights @ values.flatten(2, 3)
    return AttnState(out.flatten(1, 2), lse.flatten(1, 2))


def key_scores(
    layer: int,
    q: Float[Tensor, "rows qo_heads head_dim"],
    choice: Choice,
    candidates: Candidates,
) -> Float[Tensor, "rows kv_heads chosen group page_size"]:
    """The scores of the keys of chosen pages: fp32, -inf for keys that a row does not see."""
    k_pages, _ = candidates.pool.layer(layer)
    rule, heads = candidates.rules[layer], candidates.num_kv_heads
    row = torch.arange(len(q), device=q.device)[:, None, None]
    pages = candidates.table.pages[row, choice.ordinals]  # [rows, kv_heads, chosen]
    spans = candidates.table.spans[row, choice.ordinals]
    head = torch.arange(heads, device=q.device)[None, :, None]
    keys = k_pages[pages, head].float()  # [rows, kv_heads, chosen, page_size, head_dim]
    rotated = candidates.rotated(layer, q)
    rotated = rotated.unflatten(1, (heads, -1))  # [spans, kv_heads, group, head_dim]
    queries = rotated[spans, head]  # [rows, kv_heads, chosen, group, head_dim]
    scores: Tensor = queries @ keys.transpose(-1, -2) * rule.softmax_scale
    if rule.soft_cap:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    visible = _visible_keys(layer, choice, candidates, spans)
    return scores.masked_fill(~visible[:, :, :, None], -torch.inf)


def _visible_keys(
    layer: int, choice: Choice, candidates: Candidates, spans: Int[Tensor, "rows kv_heads chosen"]
) -> Bool[Tensor, "rows kv_heads chosen page_size"]:
    """Mask of the keys that are visible to their row, in the chosen pages."""
    table, window = candidates.table, candidates.rules[layer].window
    device = spans.device
    row = torch.arange(len(spans), device=device)[:, None, None]
    slots = torch.arange(candidates.pool.page_size, device=device)
    positions = table.starts[row, choice.ordinals][..., None] + slots
    column = torch.arange(spans.shape[2], device=device)
    visible = (column < choice.counts[..., None])[..., None] & (
        positions < table.span_bound[spans][..., None]
    )
    if window:
        visible = visible & (candidates.span_positions[spans][..., None] - positions < window)
    if len(table.mask_words):
        first = table.span_mask[spans][..., None]
        word = (first + positions // 32).clamp(0, len(table.mask_words) - 1)
        hidden = (table.mask_words[word] >> positions % 32) & 1
        visible = visible & ~((first >= 0) & (hidden == 1))
    return visible


class RowReads(NamedTuple):
    """The reads of one row in a step, summed over layers and KV heads.

    ``pages`` of ``of_pages`` were read. The choice itself read ``looked_bytes``. ``recall`` is the
    share of the attention in the chosen pages, None if unmeasured."""

    pages: int
    of_pages: int
    looked_bytes: int
    recall: float | None


@dataclass(frozen=True)
class SelectedRows:
    """The rows of one policy in one step, by ``indices`` into its rows.

    ``tallies`` count chosen pages layer by layer, on the device or on the host. ``recalls`` has the
    measured recall of each row, ``looked`` the bytes that a choice reads of a candidate.
    """

    policy: PagePolicy
    indices: Sequence[int]
    candidates: Candidates
    num_layers: int
    tallies: list[Tensor] = field(default_factory=list)
    recalls: list[Tensor] = field(default_factory=list)
    looked: list[int] = field(default_factory=list)
    # choices that later layers read, by layer
    _choices: dict[int, Choice] = field(default_factory=dict)

    @cached_property
    def rows(self) -> Tensor:
        """The row indices, on the pool's device."""
        return torch.tensor(self.indices).to(self.candidates.pool.kv.device)

    def reads(self) -> list[RowReads]:
        """The reads of each row, after the last layer; waits for the device where the choice ran
        on tensors."""
        size, heads = self.candidates.pool.page_size, self.candidates.num_kv_heads
        dense = sum(layer in self.policy.dense_layers for layer in range(self.num_layers))
        choosing = (self.num_layers - dense) * heads
        recalls = torch.stack(self.recalls).mean(0).tolist() if self.recalls else []
        reads, tallies = [], self._tallied()
        for n, row in enumerate(self.candidates.rows):
            always_read = row.num_other(size) + row.num_patches
            num_pages = row.num_candidates + always_read
            always_read *= row.rest
            pages = tallies[n] + choosing * always_read + dense * heads * num_pages
            looked = heads * row.num_candidates * sum(self.looked)
            recall = recalls[n] if recalls and row.measured else None
            reads.append(RowReads(pages, self.num_layers * heads * num_pages, looked, recall))
        return reads

    def _tallied(self) -> list[int]:
        """Pages of each row, summed over the host's and the device's tallies."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for tally in self.tallies:
            by_device.setdefault(tally.device, []).append(tally)
        sums = [torch.stack(tallies).sum(0).tolist() for tallies in by_device.values()]
        return [sum(counts) for counts in zip(*sums, strict=True)]

    def begin(self, layer: int, q: Tensor) -> None:
        """Does nothing: `join` reads the chosen pages."""

    def join(self, layer: int, q: Tensor, states: AttnState, row_state_indptr: Tensor) -> None:
        """Write the state over the chosen pages as the last of each row's ``states``."""
        queries = q[self.rows]
        source = self.candidates.sources[layer]
        if source == layer:
            self._choices[layer] = self.policy.choose(layer, queries, self.candidates)
        choice = self._choices[source]
        state = attend_chosen(layer, queries, choice, self.candidates)
        self.count(choice.counts.sum(-1), choice.looked, choosing=int(source == layer))
        if choice.join is not None:
            state = merge_all((state, choice.join()))
        if any(row.measured for row in self.candidates.rows):
            rest_lse = self._rest_lse(states, row_state_indptr)
            everything = attend_chosen(
                layer, queries, self.candidates.everything(), self.candidates
            )
            log_share = torch.logaddexp(state.lse, rest_lse) - torch.logaddexp(
                everything.lse, rest_lse
            )
            self.recalls.append(log_share.exp().mean(-1))
        if choice.on_merged is not None:
            rest = self._rest(states, row_state_indptr) if choice.include_rest else None
            choice.on_merged(state if rest is None else merge_all((state, rest)))
        last_state = row_state_indptr[self.rows + 1].long() - 1
        states.out[last_state] = state.out
        states.lse[last_state] = state.lse

    def count(self, pages: Tensor, looked: int = 0, choosing: int = 1) -> None:
        """Add ``pages`` of each row to the tallies, for layers of which ``choosing`` choose.

        ``looked`` counts numbers of a candidate's keys that a choice reads besides its summary."""
        self.tallies.append(pages)
        pool, summary = self.candidates.pool, self.policy.summary
        width = 0 if summary is None else summary.width * pool.kv.shape[5]
        self.looked.append(choosing * (width + looked) * pool.kv.element_size())

    def _rest_lse(self, states: AttnState, row_state_indptr: Tensor) -> Tensor:
        """The lse of the pages that each row always reads."""
        bounds = row_state_indptr.tolist()
        lses = [states.lse[bounds[n] : bounds[n + 1] - 1].logsumexp(0) for n in self.indices]
        return torch.stack(lses)

    def _rest(self, states: AttnState, row_state_indptr: Tensor) -> AttnState:
        """The state of each row over the pages that it always reads."""
        lse, bounds = self._rest_lse(states, row_state_indptr), row_state_indptr.tolist()
        pivot = lse.masked_fill(lse == -torch.inf, 0.0)
        outs = []
        for n, row_pivot in zip(self.indices, pivot, strict=True):
            own_states = slice(bounds[n], bounds[n + 1] - 1)
            weights = (states.lse[own_states] - row_pivot).exp()[..., None]
            outs.append((weights * states.out[own_states].float()).sum(0))
        return AttnState(torch.stack(outs), lse)
