"""A step whose new rows attend to keys and values expanded from latents; see docs/latent.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.plan.chunks import PrefillChunk, sent_spans
from looseleaf.attention.plan.expanded import expanded_spans
from looseleaf.attention.plan.lists import PageArray, int32
from looseleaf.attention.select.layer_reads import StepReads
from looseleaf.kv.pool import LayerPages
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.gather_kv import GATHERED_SIZE
from looseleaf.ops.prefill_attention import SpanList, gathered_pages, prefill_attention
from looseleaf.types import Attend, Expand, Rotation, ScoreRule

# of the expanded keys and values of one layer; more heads are expanded one group after another
_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class ExpandedRows:
    """The last ``num_rows`` rows of a step, and their span list over gathered keys.

    They attend to expanded keys in the first ``num_layers`` layers."""

    spans: SpanList
    num_rows: int
    num_positions: int
    num_layers: int


def expanded_rows(
    chunks: Sequence[PrefillChunk],
    page_size: int,
    device: torch.device,
    num_layers: int,
    page_array: PageArray = int32,
) -> ExpandedRows | None:
    """The rows of ``chunks``, None if their keys can't be gathered."""
    spans = expanded_spans(chunks, page_size, page_array)
    if spans is None:
        return None
    rows = sum(len(chunk.positions) for chunk in chunks)
    positions = 1 + max(int(chunk.positions[-1]) for chunk in chunks)
    return ExpandedRows(sent_spans(spans, device), rows, positions, num_layers)


@dataclass(frozen=True)
class ExpandingStep:
    """``step``, which stores all keys and attends for all rows but the ``expanded`` ones."""

    step: Attend
    reads: StepReads
    expanded: ExpandedRows
    pages: Callable[[int], LayerPages]
    rotations: Sequence[Rotation]
    rules: Sequence[ScoreRule]
    implementation: Implementation

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        return self.step(layer, q, k, v)

    def num_expanded(self, layer: int) -> int:
        """See `looseleaf.types.ExpandingAttend`."""
        return self.expanded.num_rows if layer < self.expanded.num_layers else 0

    def attend_expanded(
        self, layer: int, q: Float[Tensor, "rows heads dims"], expand: Expand
    ) -> Float[Tensor, "rows heads dims"]:
        """See `looseleaf.types.ExpandingAttend`."""
        pages, rotation = self.pages(layer), self._rotation(layer)
        latents, _ = gathered_pages(q, *pages, self.expanded.spans, rotation, self.implementation)
        stored = latents.view(-1, latents.shape[-1])
        value_start = rotation.rotary_dim
        spans = replace(
            self.expanded.spans, source_slots=None, source_turns=None, value_start=value_start
        )
        out, (_, num_heads, dims) = torch.empty_like(q), q.shape
        bytes_a_head = 2 * len(stored) * dims * q.itemsize
        count = max(1, min(num_heads, _MOST_BYTES // bytes_a_head))
        for start in range(0, num_heads, count):
            heads = slice(start, min(start + count, num_heads))
            sides = expand(stored, heads).unflatten(2, (-1, GATHERED_SIZE)).transpose(1, 2)
            state = prefill_attention(
                q[:, heads],
                sides[0],
                sides[1],
                spans,
                rotation,
                self.rules[layer],
                implementation=self.implementation,
            )
            out[:, heads] = state.out
        return out

    def _rotation(self, layer: int) -> Rotation:
        """The layer's rotation up to the last row: a CPU makes a further table from it."""
        rotation, stop = self.rotations[layer], self.expanded.num_positions
        return replace(rotation, cos=rotation.cos[:stop], sin=rotation.sin[:stop])
