"""Host-resident segments: keys and values in host memory outside the pool, with a vector index.

They allow documents longer than the pool. Keys are rotated in the segment's frame, as in pages.
Each head is contiguous, so that searches read keys without a copy; all requests share them."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.index import KeyVectors, SegmentIndex
from looseleaf.kv.keys import SegmentKey
from looseleaf.ops.native.host_memory import host_zeros


@dataclass(eq=False)
class HostedSegment:
    """``kv[layer]`` has keys, rotated into the frame, and values, for each KV head and token.

    With one of ``planes`` the keys are the values.

    ``queries_of[layer]`` is a sample of the segment's own queries, in the frame, kept until the
    index is built. ``filled`` counts computed tokens. ``index`` is None until it is built; a
    segment without an index is read in full."""

    key: SegmentKey
    num_tokens: int
    kv: Float[Tensor, "layers planes kv_heads tokens head_dim"]
    queries_of: list[Float[Tensor, "qo_heads sampled head_dim"]] = field(default_factory=list)
    filled: int = 0
    index: SegmentIndex | None = None
    _vectors: dict[tuple[int, int], KeyVectors] = field(default_factory=dict)

    def __repr__(self) -> str:
        # without the tensors, which are large
        index = "no index" if self.index is None else f"a {self.index.config.kind} index"
        progress = "" if self.ready else f", {self.filled} of them computed"
        return (
            f"HostedSegment({self.num_tokens} tokens{progress}, {index}, "
            f"{self.num_bytes / 2**20:.1f} MiB)"
        )

    @classmethod
    def empty(
        cls,
        key: SegmentKey,
        num_tokens: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        planes: int = 2,
        dtype: torch.dtype,
    ) -> "HostedSegment":
        """A zeroed segment, before its keys and values are computed."""
        shape = (num_layers, planes, num_kv_heads, num_tokens, head_dim)
        return cls(key, num_tokens, host_zeros(shape, dtype))

    @property
    def layers(self) -> list[Float[Tensor, "planes kv_heads tokens head_dim"]]:
        """Keys and values, layer by layer."""
        return list(self.kv)

    @property
    def ready(self) -> bool:
        """Whether all keys and values are computed."""
        return self.filled == self.num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, and of the index."""
        stored = self.kv.numel() * self.kv.element_size()
        return stored + (self.index.num_bytes if self.index else 0)

    def keys(self, layer: int, kv_head: int) -> Float[Tensor, "tokens head_dim"]:
        """The keys of a head, in the frame."""
        return self.kv[layer, 0, kv_head]

    def value_rows(self, layer: int, kv_head: int) -> Float[Tensor, "tokens head_dim"]:
        """The values of a head."""
        return self.kv[layer, -1, kv_head]

    def queries(self, layer: int, qo_head: int) -> Float[Tensor, "queries head_dim"]:
        """The sampled queries of a head, fp32, in the frame; empty for a segment without tokens."""
        if not self.num_tokens:
            return torch.empty(0, self.kv.shape[-1])
        return self.queries_of[layer][qo_head].float()

    def values(self, layer: int, kv_head: int) -> KeyVectors:
        """The values of the indexed tokens, whose row numbers are the ids of hits."""
        if (layer, kv_head) not in self._vectors:
            assert self.index is not None
            tokens = self.index.indexed
            values = self.kv[layer, -1, kv_head, tokens.start : tokens.stop]
            self._vectors[layer, kv_head] = KeyVectors(values, len(values))
        return self._vectors[layer, kv_head]
