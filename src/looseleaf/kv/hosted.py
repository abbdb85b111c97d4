"""Segments whose keys and values stay in the host's memory, beside the pool, with their index.

A document may be longer than the pool. Its keys stand in its frame, as in pages, head by head in
one run of memory, so that a search reads them where they lie; one copy serves every request."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.index import KeyVectors, SegmentIndex
from looseleaf.kv.keys import SegmentKey
from looseleaf.ops.native.host_memory import host_zeros


@dataclass(eq=False)
class HostedSegment:
    """``kv[layer]`` has keys, turned into the frame, and values, for each KV head and token.

    ``queries`` is a sample of the segment's own queries of each layer, ``[qo_heads, sampled,
    head_dim]``, in the frame, kept until the index is built. ``filled`` tokens are computed;
    ``index`` is there once it is built, and a segment without one is read whole."""

    key: SegmentKey
    num_tokens: int
    kv: Float[Tensor, "layers 2 kv_heads tokens head_dim"]
    queries_of: list[Float[Tensor, "qo_heads sampled head_dim"]] = field(default_factory=list)
    filled: int = 0
    index: SegmentIndex | None = None
    _vectors: dict[tuple[int, int], KeyVectors] = field(default_factory=dict)

    def __repr__(self) -> str:
        # of the keys themselves nobody would read a line
        index = "no index" if self.index is None else f"a {self.index.config.kind} index"
        done = "" if self.ready else f", {self.filled} of them computed"
        return (
            f"HostedSegment({self.num_tokens} tokens{done}, {index}, "
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
        dtype: torch.dtype,
    ) -> "HostedSegment":
        """Room for a segment that is yet to be computed."""
        shape = (num_layers, 2, num_kv_heads, num_tokens, head_dim)
        return cls(key, num_tokens, host_zeros(shape, dtype))

    @property
    def layers(self) -> list[Float[Tensor, "2 kv_heads tokens head_dim"]]:
        """Keys and values, layer by layer."""
        return list(self.kv)

    @property
    def ready(self) -> bool:
        """Whether all keys and values are there."""
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
        return self.kv[layer, 1, kv_head]

    def queries(self, layer: int, qo_head: int) -> Float[Tensor, "queries head_dim"]:
        """Some of the segment's own queries, in the frame; none of one without tokens, for which
        nothing is computed."""
        if not self.num_tokens:
            return torch.empty(0, self.kv.shape[-1])
        return self.queries_of[layer][qo_head].float()

    def values(self, layer: int, kv_head: int) -> KeyVectors:
        """The values of the indexed tokens, to be weighed with a search's hits."""
        if (layer, kv_head) not in self._vectors:
            assert self.index is not None
            tokens = self.index.indexed
            values = self.kv[layer, 1, kv_head, tokens.start : tokens.stop]
            self._vectors[layer, kv_head] = KeyVectors(values, len(values))
        return self._vectors[layer, kv_head]
