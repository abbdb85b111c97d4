"""A layer's heads in the stored heads of a model whose layers have heads of several sizes.

Pages have one shape for all layers. A stored head holds as many of a layer's heads as fit into its
dims, as many copies of the layer's heads fill the stored heads, and unused dims are 0. A query has
zeros in the dims of other heads, so its score is that of its own head. Its output is the part in
the dims of its own head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config import LayerHeads, ModelConfig
from looseleaf.errors import UnsupportedModel


def stored_heads(layers: Sequence[LayerHeads]) -> tuple[int, int]:
    """The number and the dims of stored heads for ``layers``, the fewest that hold each layer.

    Raises UnsupportedModel if the heads of a layer do not fill them evenly."""
    head_dim = max(heads.head_dim for heads in layers)
    counts = {heads.num_kv_heads // _per_stored(heads, head_dim) for heads in layers}
    most = max(counts)
    if any(most % count for count in counts):
        forms = sorted({(heads.num_kv_heads, heads.head_dim) for heads in layers})
        shown = ", ".join(f"{count} x {dim}" for count, dim in forms[:4])
        raise UnsupportedModel(
            f"KV heads of {shown} dims don't share one page layout: use a checkpoint in which the "
            "numbers of KV heads divide each other"
        )
    return most, head_dim


def _per_stored(heads: LayerHeads, stored_dim: int) -> int:
    """How many of a layer's KV heads one stored head holds."""
    fit = stored_dim // heads.head_dim
    return fit if heads.num_kv_heads % fit == 0 else 1


@dataclass(frozen=True, eq=False)
class Packing:
    """The columns of one layer's queries and KV heads in stored heads, on the model's device."""

    queries: Int[Tensor, " qo_columns"]
    keys: Int[Tensor, " kv_columns"]
    num_qo_heads: int
    head_dim: int
    stored_dim: int
    num_packed: int
    copies: int

    @classmethod
    def create(
        cls, config: ModelConfig, layer: int, device: torch.device | str = "cpu"
    ) -> "Packing | None":
        """The packing of ``layer``; None if its heads are stored as they are."""
        own, stored_dim = config.heads_of(layer), config.head_dim
        if (own.num_kv_heads, own.head_dim) == (config.num_kv_heads, stored_dim):
            return None
        per_stored = _per_stored(own, stored_dim)
        half, kv_heads = own.head_dim // 2, torch.arange(own.num_kv_heads)
        dims = torch.arange(own.head_dim)
        # the halves of a head, whose dims rotate in pairs, are in the halves of a stored head
        within = dims // half * (stored_dim // 2) + dims % half
        slots = (kv_heads % per_stored * half)[:, None] + within
        keys = (kv_heads // per_stored * stored_dim)[:, None] + slots
        heads = torch.arange(config.num_qo_heads)
        group = config.num_qo_heads // own.num_kv_heads
        queries = (heads * stored_dim)[:, None] + slots[heads // group]
        num_packed = own.num_kv_heads // per_stored
        return cls(
            queries.flatten().to(device), keys.flatten().to(device), config.num_qo_heads,
            own.head_dim, stored_dim, num_packed, config.num_kv_heads // num_packed,
        )  # fmt: skip

    def pack_queries(
        self, q: Float[Tensor, "rows qo_heads head_dim"]
    ) -> Float[Tensor, "rows qo_heads stored_dim"]:
        """Queries in the dims of stored heads."""
        wide = q.new_zeros(len(q), self.num_qo_heads * self.stored_dim)
        return wide.index_copy_(1, self.queries, q.flatten(1)).view(
            len(q), self.num_qo_heads, self.stored_dim
        )

    def pack_keys(
        self, heads: Float[Tensor, "rows kv_heads head_dim"]
    ) -> Float[Tensor, "rows stored_heads stored_dim"]:
        """Keys or values as stored heads."""
        wide = heads.new_zeros(len(heads), self.num_packed * self.stored_dim)
        packed = wide.index_copy_(1, self.keys, heads.flatten(1)).view(
            len(heads), self.num_packed, self.stored_dim
        )
        return packed if self.copies == 1 else packed.repeat_interleave(self.copies, 1)

    def unpack(
        self, attended: Float[Tensor, "rows qo_heads stored_dim"]
    ) -> Float[Tensor, "rows features"]:
        """The outputs of all query heads, in the dims of their own heads."""
        return attended.flatten(1).index_select(1, self.queries)
