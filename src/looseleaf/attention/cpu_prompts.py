"""New rows of a step on the CPU: prepared once for layers with equal rotation and rule.

Many rows over several spans read gathered keys: one span in prompt order, in which replaced keys
and frames are resolved. Without gathering every span is a call of its own, with few keys."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from looseleaf.attention.host_prefill import HostedChunk
from looseleaf.attention.plan.chunks import PrefillChunk, make_span_list, sent_spans
from looseleaf.attention.plan.gathered import MOST_GATHERED, gather_chunks, gathered_spans
from looseleaf.kv.pool import PagePool
from looseleaf.ops.add_sinks import add_sinks
from looseleaf.ops.flash.cpu import PageLayout, page_memory
from looseleaf.ops.gather_kv import GATHERED_SIZE, KeySources, gather_kv
from looseleaf.ops.page_dtypes import FP8, same_memory
from looseleaf.ops.prefill_attention.cpu import PreparedRequest, prepare_prefill, run_prefill
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.ops.rotate.cpu import AngleTable
from looseleaf.types import AttnState, Rotation, ScoreRule

_CPU = torch.device("cpu")
# fewest rows and spans of prompts whose keys are gathered, and most keys per span: long spans are
# read in place, because a copy takes longer than the calls that it saves
_MANY_ROWS, _MANY_SPANS, _SHORT_SPAN = 129, 3, 512
Memory = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Prefill:
    """New rows for some layers. With ``sources`` they read gathered keys, else keys in place."""

    requests: tuple[PreparedRequest, ...]
    sources: KeySources | None = None


@dataclass(frozen=True)
class PromptReads:
    """Reads of new rows over ``pool``, whose layers have ``memory``.

    ``alike`` has for every layer the first one with equal rotation and rule. With ``invariant``
    keys are read in place, because gathering depends on the batch."""

    pool: PagePool
    memory: Sequence[Memory]
    layout: PageLayout
    tables: Sequence[AngleTable]
    rotations: Sequence[Rotation]
    rules: Sequence[ScoreRule]
    alike: Sequence[int]
    row_dtype: torch.dtype
    invariant: bool
    _gathers: bool = field(init=False)

    def __post_init__(self) -> None:
        layers = (self.pool.layer(layer) for layer in range(len(self.rules)))
        # keys that are the values as well have no second side to gather
        apart = all(not same_memory(k, v) and k.shape == v.shape for k, v in layers)
        object.__setattr__(self, "_gathers", apart and not self.invariant)

    def prepare(
        self, chunks: Sequence[PrefillChunk], layers: Sequence[int]
    ) -> list[Prefill | None]:
        """``chunks`` prepared for ``layers``, once for layers with equal rotation and rule."""
        if not chunks:
            return [None] * len(layers)
        largest = max(len(chunk.positions) for chunk in chunks)
        spans = self._gathered(chunks, largest)
        if spans is None:
            spans = make_span_list(chunks, tile_rows=largest, device=_CPU)
        sources = None
        if spans.source_slots is not None and spans.source_turns is not None:
            sources = KeySources(spans.source_slots, spans.source_turns)
        by_layer: dict[int, Prefill] = {}
        for layer in layers:
            if self.alike[layer] not in by_layer:
                requests = self._requests(spans, layer, gathered=sources is not None)
                by_layer[self.alike[layer]] = Prefill(requests, sources)
        return [by_layer[self.alike[layer]] for layer in layers]

    def attend(self, layer: int, q: Tensor, prefill: Prefill) -> AttnState:
        """The states of the new rows ``q`` in a layer."""
        memory = self.memory[layer]
        if prefill.sources is not None:
            memory = self._gather(layer, prefill.sources)
        return run_prefill(q, *memory, prefill.requests, self.rules[layer])

    def _gathered(self, chunks: Sequence[PrefillChunk], largest: int) -> SpanList | None:
        """The span list of ``chunks`` over gathered keys, None where that does not pay."""
        if not self._gathers or largest < _MANY_ROWS:
            return None
        num_spans = max(len(chunk.spans) for chunk in chunks)
        num_keys = sum(int(chunk.positions[-1]) + 1 for chunk in chunks if len(chunk.positions))
        most = min(MOST_GATHERED, _SHORT_SPAN * sum(len(chunk.spans) for chunk in chunks))
        if num_spans < _MANY_SPANS or num_keys > most:
            return None
        gathered = gather_chunks(chunks, self.pool.page_size)
        return None if gathered is None else sent_spans(gathered_spans(gathered, largest), _CPU)

    def _requests(
        self, spans: SpanList, layer: int, *, gathered: bool
    ) -> tuple[PreparedRequest, ...]:
        table, rule = self.tables[layer], self.rules[layer]
        if gathered:
            pages = self._empty_pages(layer, 1)[0]
            layout = PageLayout.of(pages, self.layout.num_qo_heads)
            return prepare_prefill(spans, layout, table, rule)
        return prepare_prefill(spans, self.layout, table, rule, self.pool.slot_positions)

    def _gather(self, layer: int, sources: KeySources) -> Memory:
        """Keys and values of ``sources``, as `page_memory` has them."""
        k, v = self._empty_pages(layer, len(sources.slots) // GATHERED_SIZE)
        k_pages, v_pages = self.pool.layer(layer)
        gather_kv(k_pages, v_pages, sources, self.rotations[layer], k, v, "reference")
        return page_memory(k), page_memory(v)

    def _empty_pages(self, layer: int, num_pages: int) -> Memory:
        """Gathered pages, ``[num_pages, kv_heads, slots, head_dim]``; those of a head are
        contiguous, so attention reads them in place."""
        stored = self.pool.layer(layer)[0]
        dtype = self.row_dtype if stored.dtype is FP8 else stored.dtype
        shape = (2, stored.shape[1], num_pages, GATHERED_SIZE, stored.shape[3])
        k, v = torch.empty(shape, dtype=dtype).transpose(1, 2)
        return k, v


@dataclass(frozen=True)
class Prompts:
    """The new rows of a step, prepared for every layer."""

    reads: PromptReads
    prefill: list[Prefill | None]
    hosted: Sequence[Sequence[HostedChunk]]

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Write the output of the new rows ``q`` to ``out``."""
        prefill, rule = self.prefill[layer], self.reads.rules[layer]
        if prefill is None:
            return
        state = self.reads.attend(layer, q, prefill)
        for chunk in self.hosted[layer]:
            chunk.join(layer, q, state, rule, self.reads.rotations[layer])
        if rule.sinks is not None:
            add_sinks(state, rule.sinks, "cpu")
        out[:] = state.out
