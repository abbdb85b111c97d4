"""Eviction in a step: outputs that evict keys of their text, weighted by their queries."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.attention.paged import PagedAttention
from looseleaf.config import EVICTING
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import InvalidRequest
from looseleaf.kv.pool import PagePool
from looseleaf.prompt.feature import Feature, FeatureRows, FeatureSequence
from looseleaf.prompt.request import DocumentPart, Request
from looseleaf.sparse import Eviction, TextPages, make_evictor
from looseleaf.types import Attend

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class EvictedKeys(Feature):
    """An output evicts keys of its text; its queries weight the keys."""

    replays = False
    sees_queries = True
    eviction: Eviction
    pool: PagePool

    def wrap(self, attend: Attend, rows: FeatureRows, last_rows: Seq[int] | None) -> Attend:
        seen = slice(rows.rows.start, rows.rows.stop)

        def tapped(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            self.eviction.see(layer, q[seen], rows.ends_prompt)
            return attend(layer, q, k, v)

        return tapped

    def computed(self, sequence: FeatureSequence, *, ends_prompt: bool) -> None:
        """Weight the keys of the text, evict those above the budget, and free their pages."""
        eviction, tail = self.eviction, sequence.tail
        num_keys = tail.computed - eviction.num_evicted
        text = TextPages(self.pool, tail.pages, num_keys)
        eviction.book(text, tail.position(tail.computed - 1), ends_prompt)
        page_size = self.pool.page_size
        if not sequence.decodes or not eviction.due(num_keys, page_size, ends_prompt):
            return
        count = -(-eviction.evict(text) // page_size)
        sequence.num_evicted = eviction.num_evicted
        self.pool.free(tail.pages[count:])
        tail.pages, tail.segments = tail.pages[:count], tail.segments[:count]

    def reset(self) -> None:
        self.eviction.reset()


@dataclass(frozen=True)
class Evictions:
    """Makes the evictions of one engine."""

    attention: PagedAttention

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if other sequences share the keys, or if attention depends on the
        keys' positions."""
        select = request.select
        if select is None or select.policy not in EVICTING:
            return
        name = f"select={select.policy!r} throws keys away"
        if any(isinstance(part, DocumentPart) for part in request.parts):
            raise InvalidRequest(
                f"{name}, and documents are read by others too: give them as text, or choose a "
                "policy that keeps everything, such as quest",
                "select",
            )
        if request.revise is not None:
            raise InvalidRequest(
                f"{name}, so that earlier tokens have nothing more to read: leave revise out, or "
                "choose a policy that keeps everything, such as quest",
                "select",
                "revise",
            )
        if any(rule.window or rule.alibi_slopes is not None for rule in self.attention.rules):
            raise InvalidRequest(
                f"{name}, but this model's layers see a window, so they must know where a key "
                "stands: choose a policy that keeps everything, such as window",
                "select",
            )
        if self.attention.pool.kv.dtype not in _DTYPES:
            raise InvalidRequest(
                f"{name}, which is not done with keys of 8 bits: leave kv_dtype out",
                "select",
                "kv_dtype",
            )

    def eviction(self, sequence: Sequence, request: Request) -> EvictedKeys | None:
        """The eviction of ``sequence``, None if its request keeps all keys."""
        evictor = make_evictor(request.select, request.num_tokens)
        if evictor is None:
            return None
        # its pages change, so they can't be a shared prefix
        sequence.tail.fused = sequence.chooses = True
        attention = self.attention
        eviction = Eviction(
            evictor, attention.rotations, attention.rules, query_scaling=attention.query_scaling
        )
        return EvictedKeys(eviction, self.attention.pool)
