"""A step that is watched: besides the output, which stored keys its rows attend to, and how much.

Plain operator calls, one of each a layer: such steps come once a request, to choose tokens."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.groups import ReadSpan
from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan import PrefillChunk, make_span_list
from looseleaf.ops.attention_received import Readers, attention_received
from looseleaf.ops.prefill_attention import prefill_attention
from looseleaf.ops.store_kv import store_kv
from looseleaf.types import AttnState

# weights of so many rows are held at a time, for all heads and keys
_TILE_ROWS = 16


@dataclass(frozen=True)
class Watch:
    """What is watched: keys of ``spans`` of each chunk, in these ``layers``, by rows of the given
    ``weight``.

    Of each row only keys before ``before`` count, its own part's first position."""

    spans: Sequence[Sequence[ReadSpan]]
    layers: Container[int]
    weight: Float[Tensor, " rows"]
    before: Sequence[int]


@dataclass(eq=False)
class ChunkStep:
    """The attention of one step over chunks, with the lse. ``slots`` and ``frame_positions`` as in
    `StepRows`.
    """

    owner: PagedAttention
    chunks: Sequence[PrefillChunk]
    slots: Tensor
    frame_positions: Tensor

    def __post_init__(self) -> None:
        self._spans = self.owner.planner.span_list(self.chunks)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.state(layer, q, k, v).out if len(q) else q

    def state(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
        """Keep keys and values, and attend; at least one row."""
        owner, spans, chosen = self.owner, self._spans, self.owner.implementation
        k_pages, v_pages = owner.pool.layer(layer)
        rotation, rule = owner.rotation, owner.rules[layer]
        implementation = "cpu" if chosen == "native" else chosen
        stores = "reference" if implementation == "cpu" else implementation
        store_kv(k, v, self.frame_positions, self.slots, rotation, k_pages, v_pages, stores)
        patch = owner.pool.slot_positions if spans.mask_words.numel() else None
        return prefill_attention(q, k_pages, v_pages, spans, rotation, rule, patch, implementation)


@dataclass(eq=False)
class WatchedStep:
    """A step whose attention is watched.

    ``received`` is the largest weight that each key of the watched spans got in any layer so far,
    chunk by chunk.
    """

    step: ChunkStep
    watch: Watch
    received: Float[Tensor, " keys"] = field(init=False)

    def __post_init__(self) -> None:
        device, watch = self.step.slots.device, self.watch
        watched = [
            PrefillChunk(chunk.positions, tuple(spans))
            for chunk, spans in zip(self.step.chunks, watch.spans, strict=True)
        ]
        self._watched = make_span_list(watched, tile_rows=_TILE_ROWS, device=device)
        self._weight = watch.weight.float().to(device)
        self._before = torch.tensor(watch.before, dtype=torch.int32, device=device)
        num_keys = sum(span.length for spans in watch.spans for span in spans)
        self.received = torch.zeros(num_keys, dtype=torch.float32, device=device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not len(q):
            return q
        owner = self.step.owner
        state = self.step.state(layer, q, k, v)
        if layer in self.watch.layers:
            k_pages, _ = owner.pool.layer(layer)
            rotation, rule = owner.rotation, owner.rules[layer]
            readers = Readers(q, state.lse, self._weight, self._before)
            # there is no C of it, and no faster way on a CPU
            chosen = owner.implementation if owner.implementation != "native" else "reference"
            num_keys = len(self.received)
            found = attention_received(
                readers, k_pages, self._watched, num_keys, rotation, rule, chosen
            )
            self.received = torch.maximum(self.received, found)
        return state.out
