"""The cluster index of RetroInfer (wave index): clusters of about 16 keys, ranked by centroid.

Spherical k-means clusters keys around the segment's mean, in spans of 8,192 keys, so that build
time is linear in the length. The centroid of a cluster is the mean of its keys. The centroid also
represents the keys in estimated attention."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config.index import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index.base import CPU, Arrays, KVIndex
from looseleaf.index.keys import KeyVectors

_EFFORT = 64


class ClusterValues(NamedTuple):
    """``means`` fp32 ``[clusters, head_dim]``, the mean values of the first clusters.

    ``cluster_of`` int32 ``[keys]`` is the cluster of every key, -1 for clusters without a mean."""

    means: Tensor
    cluster_of: Tensor


class IvfIndex(KVIndex):
    """Clusters of keys; ``effort`` is the number of opened clusters.

    ``means`` is fp32 ``[clusters, head_dim]``; the members of cluster c are
    ``members[starts[c] : starts[c + 1]]``, int32. `sum_values` sets ``estimate``."""

    kind = "ivf"
    means: Tensor
    starts: Tensor
    members: Tensor
    estimate: "ClusterValues | None" = None

    @classmethod
    def build(cls, keys: KeyVectors, config: IndexConfig, device: torch.device = CPU) -> "IvfIndex":
        """Cluster all keys, on ``device``."""
        index = cls(keys, 0, config, _EFFORT)
        index.means = torch.empty(0, keys.head_dim)
        index.starts = torch.zeros(1, dtype=torch.int32)
        index.members = torch.empty(0, dtype=torch.int32)
        index.fold(device)
        return index

    def fold(self, device: torch.device = CPU) -> None:
        """Cluster the keys inserted since the last build; existing clusters do not change."""
        first, last = self.built, len(self.keys)
        if first == last:
            return
        means, assigned = cluster_keys(self.keys, first, last, self.config, device)
        order = assigned.argsort(stable=True)
        sizes = assigned.bincount(minlength=len(means))
        starts = sizes.cumsum(0).to(torch.int32) + self.starts[-1]
        self.means = torch.cat((self.means, means)).contiguous()
        self.starts = torch.cat((self.starts, starts))
        self.members = torch.cat((self.members, (order + first).to(torch.int32)))
        if self.estimate is not None:
            unassigned = torch.full((last - first,), -1, dtype=torch.int32)
            cluster_of = torch.cat((self.estimate.cluster_of, unassigned))
            self.estimate = ClusterValues(self.estimate.means, cluster_of)
        self.built = last

    def sum_values(self, values: Float[Tensor, "keys head_dim"]) -> None:
        """Store the mean value of every cluster. Clusters that `fold` adds later have none and are
        not estimated."""
        sizes = self.starts.diff().long()
        cluster = torch.arange(len(sizes)).repeat_interleave(sizes)
        sums = torch.zeros_like(self.means)
        sums.index_add_(0, cluster, values[self.members.long()].float())
        means = sums / sizes.clamp_min(1)[:, None]
        # rounded to the stored dtype, so that a loaded index gives equal results
        self._set_estimate(_narrowed(means).float())

    def _set_estimate(self, means: Float[Tensor, "clusters head_dim"]) -> None:
        sizes = self.starts[: len(means) + 1].diff().long()
        cluster_of = torch.full((self.built,), -1, dtype=torch.int32)
        clusters = torch.arange(len(means), dtype=torch.int32).repeat_interleave(sizes)
        cluster_of[self.members[: len(clusters)].long()] = clusters
        self.estimate = ClusterValues(means.contiguous(), cluster_of)

    def structure(self) -> Arrays:
        arrays = {
            "means": _narrowed(self.means).numpy(),
            "starts": self.starts.numpy(),
            "members": self.members.numpy(),
        }
        if self.estimate is not None:
            arrays["value_means"] = _narrowed(self.estimate.means).numpy()
        return arrays

    @classmethod
    def load(cls, arrays: Arrays, keys: KeyVectors, config: IndexConfig) -> "IvfIndex":
        built, effort, head_dim = (int(n) for n in arrays["sizes"])
        index = cls(keys, built, config, effort)
        index.means = torch.from_numpy(np.array(arrays["means"], dtype=np.float32))
        index.starts = torch.from_numpy(np.array(arrays["starts"], dtype=np.int32))
        index.members = torch.from_numpy(np.array(arrays["members"], dtype=np.int32))
        starts, members = index.starts, index.members
        if (
            (int(starts[0]), int(starts[-1])) != (0, len(members))
            or len(members) != built
            or index.means.shape != (len(starts) - 1, head_dim)
            or bool((starts.diff() < 0).any())
            or (len(members) and not 0 <= int(members.min()) <= int(members.max()) < built)
        ):
            raise InvalidOption("the arrays of an ivf index do not fit together: build it again")
        if config.estimate:
            values = torch.from_numpy(np.array(arrays["value_means"], dtype=np.float32))
            if values.dim() != 2 or len(values) > len(index.means) or values.shape[1] != head_dim:
                raise InvalidOption("mean values and clusters do not fit together: build it again")
            index._set_estimate(values)
        return index


def cluster_keys(
    keys: KeyVectors, first: int, last: int, config: IndexConfig, device: torch.device = CPU
) -> tuple[Float[Tensor, "clusters head_dim"], Int[Tensor, " keys"]]:
    """Mean keys of the clusters of keys ``first`` to ``last - 1``, and the cluster of each key.

    Spans of ``config.span`` keys are clustered separately; then each key is assigned to the nearest
    centroid of all spans. Empty clusters are left out."""
    runs = keys.wide(device)[first:last].split(config.span)
    total = torch.stack([run.sum(0, dtype=torch.float64) for run in runs]).sum(0)
    centre = (total / (last - first)).float()
    directions = torch.cat([_spherical_means(run - centre, config) for run in runs])
    assigned = torch.cat([_nearest(run - centre, directions) for run in runs])
    sums = torch.zeros(len(directions), keys.head_dim, device=device)
    for run, best in zip(runs, assigned.split(config.span), strict=True):
        sums.index_add_(0, best, run)
    sizes = assigned.bincount(minlength=len(directions))
    nonempty = sizes > 0
    renumbered = nonempty.cumsum(0) - 1
    means = (sums[nonempty] / sizes[nonempty, None]).cpu()
    # rounded to the stored dtype, so that a loaded index gives equal results
    return _narrowed(means).float(), renumbered[assigned].cpu()


def _narrowed(means: Tensor) -> Tensor:
    narrow = means.to(torch.float16)
    return narrow if bool(torch.isfinite(narrow).all()) else means


def _spherical_means(run: Tensor, config: IndexConfig) -> Tensor:
    """Unit centroids of about ``len(run) / cluster_size`` clusters, from evenly spaced seeds."""
    count = max(1, len(run) // config.cluster_size)
    seeds = torch.linspace(0, len(run) - 1, count).round().long().to(run.device)
    directions = torch.nn.functional.normalize(run[seeds], dim=1)
    for _ in range(config.iterations):
        best = _nearest(run, directions)
        sums = torch.zeros_like(directions).index_add_(0, best, run)
        empty = best.bincount(minlength=count) == 0
        sums[empty] = directions[empty]
        directions = torch.nn.functional.normalize(sums, dim=1)
    return directions


def _nearest(run: Tensor, directions: Tensor) -> Tensor:
    tile = max(1, (1 << (26 if run.is_cuda else 22)) // len(directions))
    return torch.cat([(part @ directions.T).argmax(1) for part in run.split(tile)])
