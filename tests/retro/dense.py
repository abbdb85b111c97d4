"""RetroAttention as plainly as it can be written: one output, dense keys, sets of Python.

Keys are kept unrotated and turned when they are read. What the engine does with pages, registers
and carried states must agree with this."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.models import Decoder
from looseleaf.rope import rope_frequencies, softmax_scale
from looseleaf_lab.testing.scene import turned_at


class Page(NamedTuple):
    """Positions ``start:stop`` that lie in one page, of a segment whose Δ is ``offset``."""

    start: int
    stop: int
    offset: int


Choose = Callable[["DenseRetro", int, Tensor, int], list[set[int]]]
"""Which pages the newest row reads: of a simulation, a layer, its query and the number of sealed
pages; a set of numbers for every KV head. Pages that are not sealed are read in any case."""


class Kept(NamedTuple):
    """What a row keeps in one layer and KV head: output, lse, and which sealed pages are in it."""

    out: Tensor
    lse: Tensor
    seen: frozenset[int] = frozenset()


@dataclass
class DenseRetro:
    """One output's attention, for a decoder to call; drive it by `prefill` and `step`.

    ``settled`` are the pages before the tail, which begins at ``tail_start``. Without ``choose``,
    and in ``dense_layers``, all is read. ``local`` "stale" keeps all pages of a row like sealed
    ones, as the paper says literally."""

    config: ModelConfig
    page_size: int
    settled: list[Page]
    tail_start: int
    choose: Choose | None = None
    window: int = 1
    local: str = "exact"
    dense_layers: tuple[int, ...] = ()
    rows: list[int] = field(default_factory=list)
    first_output: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[tuple[int, int, int], Kept] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def prefill(self, decoder: Decoder, tokens: list[int]) -> Tensor:
        """The logits of the last token of a prompt that is read densely."""
        self.rows, self.first_output = list(range(len(tokens))), len(tokens)
        return decoder.logits(decoder.forward(torch.tensor(tokens), self))[-1]

    def step(self, decoder: Decoder, tokens: list[int]) -> Tensor:
        """The logits of the newest token; ``tokens`` are those of prompt and output so far."""
        newest = len(tokens) - 1
        oldest = max(self.first_output, newest - self.window + 1)
        self.rows = list(range(newest, oldest - 1, -1))
        rows = torch.tensor([tokens[p] for p in self.rows])
        return decoder.logits(decoder.forward(rows, self))[0]

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        self.store(layer, k, v)
        heads = k.shape[1]
        grouped = q.unflatten(1, (heads, -1))
        if self.rows[0] < self.first_output or self.choose is None or layer in self.dense_layers:
            rows = [self.dense(layer, grouped[r], p) for r, p in enumerate(self.rows)]
        else:
            chosen = self.choose(self, layer, q[0], self.num_sealed)
            rows = [self.revised(layer, grouped[r], p, chosen) for r, p in enumerate(self.rows)]
        for row, position in enumerate(self.rows):
            self.outputs[layer, position] = rows[row]
        return torch.stack(rows)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keys and values ``[2, kv_heads, positions, head_dim]``, unrotated, with the rows' own."""
        if layer not in self.keys:
            self.keys[layer] = torch.zeros(2, k.shape[1], 1024, k.shape[2], dtype=k.dtype)
        self.keys[layer][:, :, self.rows] = torch.stack([k, v]).transpose(1, 2)

    @property
    def pages(self) -> list[Page]:
        """All pages at this step."""
        end = self.rows[0] + 1
        starts = range(self.tail_start, end, self.page_size)
        tail = [Page(s, min(s + self.page_size, end), self.tail_start) for s in starts]
        return [*self.settled, *tail]

    @property
    def num_sealed(self) -> int:
        """How many pages are final: those before the tail, and full ones before the window."""
        oldest = self.rows[-1]
        tail = self.pages[len(self.settled) :]
        full = [p for p in tail if p.stop - p.start == self.page_size and p.stop <= oldest]
        return len(self.settled) + len(full)

    def revised(self, layer: int, q: Tensor, position: int, chosen: list[set[int]]) -> Tensor:
        """One row: what it has kept, what it has not read yet of what is chosen, and the pages that
        are not sealed.
        """
        pages, sealed = self.pages, self.num_sealed
        covered = sealed if self.local == "exact" else len(pages)
        new_pages = (
            self.just_sealed(sealed) if self.local == "exact" else set(range(sealed, covered))
        )
        states = []
        for head, some in enumerate(chosen):
            kept = self.kept.get((layer, head, position), empty(q[head]))
            new = ({n for n in some if n < covered} | new_pages) - kept.seen
            read = [pages[n] for n in sorted(new)]
            out, lse = self.attend(layer, q[head], position, head, read, (kept.out, kept.lse))
            self.kept[layer, head, position] = Kept(out, lse, kept.seen | new)
            local = pages[covered:]
            states.append(self.attend(layer, q[head], position, head, local, (out, lse))[0])
        return torch.cat(states)

    def just_sealed(self, sealed: int) -> set[int]:
        """Pages that the step seals, and that its past rows knew as unsealed."""
        if len(self.rows) < 2:
            return set()
        # the window of the step before began a row earlier, unless it was still growing
        before = max(self.first_output, self.rows[0] - self.window)
        full = (before - self.tail_start) // self.page_size
        return set(range(len(self.settled) + max(0, full), sealed))

    def attend(
        self,
        layer: int,
        q: Tensor,
        position: int,
        head: int,
        pages: list[Page],
        before: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Output ``[group, head_dim]`` and lse of one row over ``pages``, joined to ``before``."""
        at = [p for page in pages for p in range(page.start, page.stop) if p <= position]
        if window := self.config.window(layer):
            at = [p for p in at if position - p < window]
        if not at:
            return before
        keys, values = self.keys[layer][:, head, at]
        turned = self.turn(layer, q, torch.full((len(q),), position))
        scores = turned @ self.turn(layer, keys, torch.tensor(at)).T
        scores = scores * softmax_scale(self.config, layer)
        if cap := self.config.soft_cap:
            scores = cap * torch.tanh(scores / cap)
        lse = torch.logaddexp(before[1], scores.logsumexp(-1))
        out = (scores - lse[:, None]).exp() @ values
        return out + (before[1] - lse).exp()[:, None] * before[0], lse

    def dense(self, layer: int, q: Tensor, position: int) -> Tensor:
        """The row over all that stands before it."""
        whole = [Page(0, position + 1, 0)]
        heads = range(len(q))
        return torch.cat(
            [self.attend(layer, q[h], position, h, whole, empty(q[h])[:2])[0] for h in heads]
        )

    def turn(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        rope = self.config.rope_of(layer)
        turned = turned_at(x[:, None], positions, rope_frequencies(rope).inverse, rope.interleaved)
        return turned[:, 0]


def empty(q: Tensor) -> Kept:
    """A row that has read nothing."""
    return Kept(torch.zeros_like(q), torch.full(q.shape[:1], -torch.inf, dtype=q.dtype))


def dense_sum(
    retro: DenseRetro, layer: int, q: Tensor, position: int, reads: list[set[int]]
) -> Tensor:
    """One row by plain attention over the pages ``reads[head]``; ``q`` is ``[kv_heads, group,
    head_dim]``.
    """
    pages = retro.pages
    outs = []
    for head, some in enumerate(reads):
        read = [pages[n] for n in sorted(some)]
        outs.append(retro.attend(layer, q[head], position, head, read, empty(q[head])[:2])[0])
    return torch.cat(outs)
