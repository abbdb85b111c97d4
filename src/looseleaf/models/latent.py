"""Latent attention's maps (MLA): queries to the space of stored keys, outputs to values.

A head's key is ``K c`` and its value ``V c``, for the latent ``c`` of a token. ``q . K c`` equals
``K^T q . c``, and ``sum(p V c)`` equals ``V sum(p c)``. So attention reads latents only, and each
head maps its query and its output. Long prompts expand the latents of all their keys instead, since
a pair of row and key then takes fewer products.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from looseleaf.config import LatentConfig
from looseleaf.models.layers import LatentWeights, norm_heads
from looseleaf.models.linear import project
from looseleaf.types import Attend, ExpandingAttend

# Transformers ignores rms_norm_eps in the norms of latents
_EPS = 1e-6


def latent_heads(
    fused: Float[Tensor, "rows features"],
    weights: LatentWeights,
    shape: LatentConfig,
    scale: Float[Tensor, " query_dim"] | None = None,
) -> tuple[Float[Tensor, "rows heads query_dim"], Float[Tensor, "rows 1 key_dim"]]:
    """Queries, whose first dims rotate, and stored keys, which are the values.

    ``fused`` has each row's queries or their latent, its latent, and the key's rotated dims.
    ``scale`` has factors of a query's dims."""
    rows, heads = len(fused), len(weights.key_up)
    sizes = fused.shape[1] - shape.key_dim, shape.rank, shape.rope_dim
    queries, latent, rotated = fused.split(sizes, 1)
    if weights.query_up is not None and weights.query_norm is not None:
        queries = project(norm_heads(queries, weights.query_norm, _EPS), weights.query_up)
    nope, rope = queries.view(rows, heads, -1).split((shape.nope_dim, shape.rope_dim), 2)
    q = torch.cat((rope, nope), 2)
    k = torch.cat((rotated, norm_heads(latent, weights.latent_norm, _EPS)), 1)[:, None]
    return (q if scale is None else q * scale), k


def attend_latents(
    attend: Attend,
    layer: int,
    q: Float[Tensor, "rows heads query_dim"],
    k: Float[Tensor, "new_rows 1 key_dim"],
    weights: LatentWeights,
    shape: LatentConfig,
) -> Float[Tensor, "rows features"]:
    """The heads' values of attention of ``q``, after ``k`` is stored.

    Rows read latents, and the last ones expanded keys if ``attend`` decides so."""
    count = attend.num_expanded(layer) if isinstance(attend, ExpandingAttend) else 0
    split = len(q) - count
    attended = attend(layer, _absorbed(q[:split], weights, shape), k, k)
    values = _values_of(attended, weights, shape)
    if not isinstance(attend, ExpandingAttend) or not count:
        return values
    padded = functional.pad(q[split:], (0, shape.expanded_dim - shape.query_dim))
    expand = partial(_expanded_keys, weights=weights, shape=shape)
    expanded = attend.attend_expanded(layer, padded, expand)
    stop = shape.rope_dim + shape.value_dim
    own = expanded[..., shape.rope_dim : stop].flatten(1)
    return torch.cat((values, own)) if split else own


def _absorbed(
    q: Float[Tensor, "rows heads query_dim"], weights: LatentWeights, shape: LatentConfig
) -> Float[Tensor, "rows heads key_dim"]:
    """Queries in the space of stored keys."""
    rope, nope = q.split((shape.rope_dim, shape.nope_dim), 2)
    in_latent = torch.bmm(nope.transpose(0, 1), weights.key_up).transpose(0, 1)
    return torch.cat((rope, in_latent), 2)


def _values_of(
    attended: Float[Tensor, "rows heads key_dim"], weights: LatentWeights, shape: LatentConfig
) -> Float[Tensor, "rows features"]:
    """The heads' values of attention's output over stored keys."""
    latents = attended[..., shape.rope_dim :].transpose(0, 1)
    return torch.bmm(latents, weights.value_up).transpose(0, 1).flatten(1)


def _expanded_keys(
    stored: Float[Tensor, "keys key_dim"],
    heads: slice,
    *,
    weights: LatentWeights,
    shape: LatentConfig,
) -> Float[Tensor, "2 heads keys expanded_dim"]:
    """Keys and values of ``heads``, as `looseleaf.types.Expand` describes; pads are 0."""
    key_up, value_up = weights.key_up[heads], weights.value_up[heads]
    sides = stored.new_zeros((2, len(key_up), len(stored), shape.expanded_dim))
    (k, v), start = sides, shape.rope_dim
    rotated, latent = stored.split((shape.rope_dim, shape.rank), 1)
    k[..., :start] = rotated
    latents = latent.expand(len(key_up), -1, -1)
    nope, values = k[..., start:][..., : shape.nope_dim], v[..., start:][..., : shape.value_dim]
    torch.bmm(latents, key_up.transpose(1, 2), out=nope)
    torch.bmm(latents, value_up, out=values)
    return sides
