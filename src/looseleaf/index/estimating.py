"""What an index did not find, estimated by its clusters (RetroInfer's estimation zone).

A key that was not found counts as if it were the mean key of its cluster, with the mean value of
those keys of the cluster that were not found. So every key counts once, found or not."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.index.ivf import IvfIndex
from looseleaf.index.keys import KeyVectors
from looseleaf.types import AttnState


def attend_estimated(
    index: IvfIndex,
    query: Float[Tensor, " head_dim"],
    found: tuple[Tensor, Tensor],
    values: KeyVectors,
    softmax_scale: float,
) -> AttnState:
    """The state of a query over all keys of ``index``, of which ``found`` are ids and scores: fp32,
    ``[head_dim]`` and one number. Those that were found count by what they are; what is newer than
    the clusters, and was not found, does not count."""
    assert index.estimate is not None, "the index has no mean values"
    means, cluster_of = index.estimate
    there = found[0] >= 0
    ids, scores = found[0][there].long(), found[1][there] * softmax_scale
    read = values.gather(ids)
    own = torch.full_like(ids, -1)
    own[ids < index.built] = cluster_of[ids[ids < index.built]].long()
    inside = own >= 0
    sizes = index.starts[: len(means) + 1].diff()
    left = sizes - own[inside].bincount(minlength=len(means))
    by_mean = index.means[: len(means)] @ query * softmax_scale
    by_mean = by_mean.masked_fill(left == 0, -torch.inf)
    top = torch.cat((scores, by_mean)).amax()
    weights, shares = (scores - top).exp(), (by_mean - top).exp()
    total = weights.sum() + (shares * left).sum()
    out = weights @ read + (shares * sizes) @ means - shares[own[inside]] @ read[inside]
    return AttnState(out / total, top + total.log())
