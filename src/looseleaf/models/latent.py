"""Latent attention's maps (MLA): queries to the space of stored keys, outputs to values.

A head's key is ``K c`` and its value ``V c``, for the latent ``c`` of a token. ``q . K c`` equals
``K^T q . c``, and ``sum(p V c)`` equals ``V sum(p c)``. So attention reads latents only, and each
head maps its query and its output.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config import LatentConfig
from looseleaf.models.layers import LatentWeights, norm_heads
from looseleaf.models.linear import project

# Transformers ignores rms_norm_eps in the norms of latents
_EPS = 1e-6


def latent_heads(
    fused: Float[Tensor, "rows features"], weights: LatentWeights, shape: LatentConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[rows, heads, key_dim]``, and keys ``[rows, 1, key_dim]``, which are the values.

    ``fused`` has each row's queries or their latent, its latent, and the key's rotated dims."""
    rows, heads = len(fused), len(weights.key_up)
    sizes = fused.shape[1] - shape.key_dim, shape.rank, shape.rope_dim
    queries, latent, rotated = fused.split(sizes, 1)
    if weights.query_up is not None and weights.query_norm is not None:
        queries = project(norm_heads(queries, weights.query_norm, _EPS), weights.query_up)
    nope, rope = queries.view(rows, heads, -1).split((shape.nope_dim, shape.rope_dim), 2)
    in_latent = torch.bmm(nope.transpose(0, 1), weights.key_up).transpose(0, 1)
    q = torch.cat((rope, in_latent), 2)
    k = torch.cat((rotated, norm_heads(latent, weights.latent_norm, _EPS)), 1)[:, None]
    return q, k, k


def expand_values(
    attended: Float[Tensor, "rows heads key_dim"], weights: LatentWeights, shape: LatentConfig
) -> Float[Tensor, "rows features"]:
    """The heads' values of attention's output over stored keys."""
    latents = attended[..., shape.rope_dim :].transpose(0, 1)
    return torch.bmm(latents, weights.value_up).transpose(0, 1).flatten(1)
