"""Eviction: policies that delete keys of a request's own text, and free their pages.

Only a request's own text is evictable: other requests never read it. For every KV head and layer
the kept keys move together to the start of the text's pages. Their rotation stays, so only their
order in memory changes. Evicted keys are lost, unlike pages that a policy chooses per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config import QueryScaling
from looseleaf.kv.pool import PagePool
from looseleaf.ops.rotate import rotate
from looseleaf.rope import position_scales
from looseleaf.types import Rotation, ScoreRule

# rows whose weights are in memory together, for all heads and keys
_TILE_ROWS = 32


@dataclass(frozen=True)
class Evictor:
    """Ranks a text's keys by the attention that they receive, and keeps ``capacity`` of a KV head.

    With ``only_prompt`` keys are evicted only after the prompt; otherwise at every excess page."""

    only_prompt: ClassVar[bool] = False
    capacity: int

    def rows(self, count: int, ends_prompt: bool) -> int:
        """The number of a step's last rows, of ``count``, whose attention the scores need."""
        raise NotImplementedError

    def scores(
        self,
        before: Float[Tensor, "kv_heads keys"],
        weights: Float[Tensor, "rows kv_heads group keys"],
    ) -> Float[Tensor, "kv_heads keys"]:
        """The score of each key after a step, from its score ``before`` (0 for new keys) and the
        attention ``weights`` of the observed rows; by default the sum of its attention."""
        return before + weights.mean(2).sum(0)

    def keep(self, scores: Float[Tensor, "kv_heads keys"]) -> Int[Tensor, "kv_heads kept"]:
        """The kept keys, ascending, of more than ``capacity``; the newest is among them."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextPages:
    """The text of one output in memory: its pages and number of keys."""

    pool: PagePool
    pages: Sequence[int]
    num_keys: int

    def keys(self, layer: int) -> Float[Tensor, "kv_heads keys head_dim"]:
        """Its keys in one layer, as stored."""
        return self._read(self.pool.layer(layer)[0])

    def compact(self, layer: int, kept: Int[Tensor, "kv_heads kept"]) -> None:
        """Move the kept keys and values of every KV head to the start."""
        size, head_dim = self.pool.page_size, self.pool.kv.shape[-1]
        index = kept[..., None].expand(-1, -1, head_dim)
        slot = torch.arange(kept.shape[1], device=kept.device)
        page = self._page_index()[slot // size]
        for stored in self.pool.kv[layer]:
            moved = self._read(stored).gather(1, index)
            stored[page, :, slot % size] = moved.transpose(0, 1)

    def _read(self, stored: Tensor) -> Tensor:
        whole = stored[self._page_index()].transpose(0, 1).flatten(1, 2)
        return whole[:, : self.num_keys]

    def _page_index(self) -> Tensor:
        return torch.tensor(self.pages, dtype=torch.int64, device=self.pool.kv.device)


@dataclass(eq=False)
class Eviction:
    """Eviction of one output: the scores of its kept keys, and the number of evicted ones."""

    evictor: Evictor
    rotations: Sequence[Rotation]
    rules: Sequence[ScoreRule]
    num_evicted: int = 0
    query_scaling: QueryScaling | None = None
    _scores: dict[int, Tensor] = field(default_factory=dict)
    _queries: dict[int, Tensor] = field(default_factory=dict)
    _pending: dict[int, Tensor] = field(default_factory=dict)
    _prompt_done: bool = False

    def see(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], ends_prompt: bool
    ) -> None:
        """Observe the unrotated queries ``q`` of consecutive rows of the text."""
        count = self.evictor.rows(len(q), ends_prompt or self.evictor.only_prompt)
        if count and not self._prompt_done:
            self._queries[layer] = q[len(q) - count :].clone()

    def book(self, text: TextPages, position: int, ends_prompt: bool) -> None:
        """Update the scores after a step, whose newest row is at ``position``.

        Where only the prompt's end counts, its queries accumulate over chunks."""
        for layer, q in self._queries.items():
            earlier = self._pending.get(layer)
            both = q if earlier is None else torch.cat([earlier, q])
            self._pending[layer] = both[-self.evictor.rows(len(both), True) :]
        self._queries = {}
        if self.evictor.only_prompt and not ends_prompt:
            return
        self._prompt_done = self.evictor.only_prompt
        for layer, q in self._pending.items():
            keys = text.keys(layer).float()
            before = self._scores.get(layer)
            fresh = keys.new_zeros(keys.shape[:2])
            if before is not None:
                fresh[:, : before.shape[1]] = before
            for start in range(0, len(q), _TILE_ROWS):
                tile = q[start : start + _TILE_ROWS]
                ahead = len(q) - 1 - start - torch.arange(len(tile), device=q.device)
                weights = self._weights(layer, tile, keys, position - ahead, ahead)
                fresh = self.evictor.scores(fresh, weights)
            self._scores[layer] = fresh
        self._pending = {}

    def due(self, num_keys: int, page_size: int, ends_prompt: bool) -> bool:
        """Whether to evict now: the keys exceed the capacity, and eviction frees a page."""
        if self.evictor.only_prompt or ends_prompt:
            return ends_prompt and num_keys > self.evictor.capacity
        return num_keys >= self.evictor.capacity + page_size

    def evict(self, text: TextPages) -> int:
        """Evict the keys with the lowest scores; returns the number of kept keys."""
        for layer, scores in self._scores.items():
            kept = self.evictor.keep(scores)
            text.compact(layer, kept)
            self._scores[layer] = scores.gather(1, kept)
        num_kept = self.evictor.capacity
        self.num_evicted += text.num_keys - num_kept
        return num_kept

    def reset(self) -> None:
        """Restart the output, with all of its keys."""
        self.num_evicted = 0
        self._scores, self._queries, self._pending = {}, {}, {}
        self._prompt_done = False

    def _weights(
        self,
        layer: int,
        q: Float[Tensor, "rows qo_heads head_dim"],
        keys: Float[Tensor, "kv_heads keys head_dim"],
        positions: Int[Tensor, " rows"],
        ahead: Int[Tensor, " rows"],
    ) -> Float[Tensor, "rows kv_heads group keys"]:
        """The weights of rows that see all keys except the ``ahead`` last ones."""
        rule, q = self.rules[layer], q.float()
        if self.query_scaling is not None:
            q = q * position_scales(self.query_scaling, positions)[:, None, None]
        rotated = rotate(q, positions, self.rotations[layer]).unflatten(1, (len(keys), -1))
        scores = torch.einsum("rhgd,hnd->rhgn", rotated, keys) * rule.softmax_scale
        if rule.soft_cap:
            scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        last = keys.shape[1] - ahead
        hidden = torch.arange(keys.shape[1], device=q.device) >= last[:, None]
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        weights = scores.softmax(-1)
        if rule.sinks is not None:
            sinks = rule.sinks.view(len(keys), -1)
            weights = weights * torch.sigmoid(scores.logsumexp(-1) - sinks)[..., None]
        return weights


def best(
    scores: Float[Tensor, "kv_heads keys"], count: int, recent: int
) -> Int[Tensor, "kv_heads kept"]:
    """The ``count`` keys with the largest scores, ascending; the last ``recent`` are included."""
    forced = scores.clone()
    forced[:, scores.shape[1] - recent :] = torch.inf
    order = forced.sort(dim=-1, descending=True, stable=True).indices
    kept: Tensor = order[:, :count].sort(-1).values
    return kept
