"""Estimated attention over keys outside the hits of a search (RetroInfer's estimation zone).

The mean key of its cluster replaces every key without a hit. The value is the mean value of the
cluster's keys without a hit. So every key counts once."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.index.ivf import IvfIndex
from looseleaf.index.keys import KeyVectors
from looseleaf.types import AttnState


def attend_estimated(
    index: IvfIndex,
    query: Float[Tensor, " head_dim"],
    hits: tuple[Tensor, Tensor],
    values: KeyVectors,
    softmax_scale: float,
) -> AttnState:
    """The state of a query over all keys of ``index``: fp32 ``[head_dim]`` and a scalar lse.

    ``hits`` are ids and scores, which count exactly. Keys newer than the clusters count only if
    they are hits."""
    assert index.estimate is not None, "the index has no mean values"
    means, cluster_of = index.estimate
    valid = hits[0] >= 0
    ids, scores = hits[0][valid].long(), hits[1][valid] * softmax_scale
    hit_values = values.gather(ids)
    clusters = torch.full_like(ids, -1)
    clusters[ids < index.built] = cluster_of[ids[ids < index.built]].long()
    inside = clusters >= 0
    sizes = index.starts[: len(means) + 1].diff()
    remaining = sizes - clusters[inside].bincount(minlength=len(means))
    mean_scores = index.means[: len(means)] @ query * softmax_scale
    mean_scores = mean_scores.masked_fill(remaining == 0, -torch.inf)
    top = torch.cat((scores, mean_scores)).amax()
    weights, mean_weights = (scores - top).exp(), (mean_scores - top).exp()
    total = weights.sum() + (mean_weights * remaining).sum()
    # all keys of a cluster by its mean value, minus the hits among them
    out = weights @ hit_values + (mean_weights * sizes) @ means
    out -= mean_weights[clusters[inside]] @ hit_values[inside]
    return AttnState(out / total, top + total.log())
