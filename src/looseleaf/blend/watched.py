"""A step that measures attention: besides its output, the weight that its rows give to stored keys.

Plain operator calls, one of each a layer: such a step runs once a request, to choose tokens."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.chunks import PrefillChunk, make_span_list
from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.attention.query_scales import scaled
from looseleaf.ops.add_sinks import add_sinks
from looseleaf.ops.attention_received import Readers, attention_received
from looseleaf.ops.prefill_attention import SpanList, prefill_attention
from looseleaf.ops.store_kv import NewRows
from looseleaf.types import AttnState

# rows whose weights are in memory together, for all heads and keys
WATCHED_ROWS = 16


@dataclass(frozen=True)
class Watch:
    """The measured keys: ``spans`` of each chunk, in ``layers``, by rows of ``weight``.

    For each row only keys before ``before`` count, the first position of its placement."""

    spans: Sequence[Sequence[ReadSpan]]
    layers: Container[int]
    weight: Float[Tensor, " rows"]
    before: Sequence[int]

    @property
    def num_keys(self) -> int:
        return sum(span.length for spans in self.spans for span in spans)


def watched_chunks(chunks: Sequence[PrefillChunk], watch: Watch) -> list[PrefillChunk]:
    """The rows of ``chunks`` over the watched spans."""
    return [
        PrefillChunk(chunk.positions, tuple(spans))
        for chunk, spans in zip(chunks, watch.spans, strict=True)
    ]


@dataclass(eq=False)
class ChunkStep:
    """The attention of one step whose rows are all in ``spans``, with the lse. ``slots`` and
    ``frame_positions`` are as in `StepRows`.
    """

    owner: PagedAttention
    spans: SpanList
    slots: Tensor
    frame_positions: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        return self.state(layer, self.scaled(q), k, v).out if len(q) else q

    def scaled(self, q: Tensor) -> Tensor:
        """Queries times their factors by position, for models with such factors."""
        if self.owner.query_scaling is None:
            return q
        return scaled(q, self.owner.scales_at(self.spans.row_positions[: len(q)]))

    def state(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> AttnState:
        """Store keys and values, if the layer has any, and attend with scaled queries; needs at
        least one row."""
        owner, spans, chosen = self.owner, self.spans, self.owner.implementation
        k_pages, v_pages = owner.pool.layer(layer)
        rotation, rule = owner.rotations[layer], owner.rules[layer]
        implementation = "cpu" if chosen == "native" else chosen
        store_implementation = "reference" if implementation == "cpu" else implementation
        if k is not None and v is not None:
            rows = NewRows(k, v, self.frame_positions, self.slots, k_pages, v_pages)
            rows.store(rotation, store_implementation)
        patch = owner.pool.slot_positions if spans.mask_words.numel() else None
        state = prefill_attention(q, k_pages, v_pages, spans, rotation, rule, patch, implementation)
        return state if rule.sinks is None else add_sinks(state, rule.sinks, implementation)


@dataclass(eq=False)
class WatchedStep:
    """A step that measures the attention of ``layers`` to the keys of ``watched``, by rows of
    ``weight``, each up to its own ``before``, as in `Watch`.

    ``received`` is the largest weight of each watched key over the layers so far, chunk by chunk.
    """

    step: ChunkStep
    watched: SpanList
    layers: Container[int]
    weight: Float[Tensor, " rows"]
    before: Int[Tensor, " rows"]
    received: Float[Tensor, " keys"]

    @classmethod
    def create(cls, step: ChunkStep, chunks: Sequence[PrefillChunk], watch: Watch) -> "WatchedStep":
        """The step of ``chunks``, with the measurements of ``watch``."""
        device = step.slots.device
        spans = make_span_list(watched_chunks(chunks, watch), tile_rows=WATCHED_ROWS, device=device)
        weight = watch.weight.float().to(device)
        before = torch.tensor(watch.before, dtype=torch.int32, device=device)
        received = torch.zeros(watch.num_keys, dtype=torch.float32, device=device)
        return cls(step, spans, watch.layers, weight, before, received)

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if not len(q):
            return q
        owner, q = self.step.owner, self.step.scaled(q)
        state = self.step.state(layer, q, k, v)
        if layer in self.layers:
            k_pages, _ = owner.pool.layer(layer)
            rotation, rule = owner.rotations[layer], owner.rules[layer]
            readers = Readers(q, state.lse, self.weight, self.before)
            # the operator has no C kernel
            implementation = owner.implementation if owner.implementation != "native" else "cpu"
            num_keys = len(self.received)
            received = attention_received(
                readers, k_pages, self.watched, num_keys, rotation, rule, implementation
            )
            self.received = torch.maximum(self.received, received)
        return state.out


def no_rows(layer: int, hidden: Tensor) -> Tensor:
    """The hook that drops all rows."""
    return hidden[:0]
