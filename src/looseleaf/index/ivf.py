"""Clusters of about 16 keys, opened in the order of their centroids: RetroInfer's wave index.

Keys are clustered by direction around their segment's mean, run by run of 8,192, so that building
is linear in the length; a cluster is judged by the mean of its members, which also stands for them
where they are only estimated."""

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
    """``means`` fp32 ``[clusters, head_dim]``, the mean values of the first clusters, and the
    cluster of every key in the structure, int32, -1 for those of other clusters."""

    means: Tensor
    cluster_of: Tensor


class IvfIndex(KVIndex):
    """``effort`` is the number of clusters opened.

    ``means`` is fp32 ``[clusters, head_dim]``; the members of cluster c are
    ``members[starts[c] : starts[c + 1]]``, int32. ``estimate`` is there if the keys' values were
    summed up too."""

    kind = "ivf"
    means: Tensor
    starts: Tensor
    members: Tensor
    estimate: "ClusterValues | None" = None

    @classmethod
    def build(cls, keys: KeyVectors, config: IndexConfig, device: torch.device = CPU) -> "IvfIndex":
        """Cluster all keys; ``device`` compares."""
        index = cls(keys, 0, config, _EFFORT)
        index.means = torch.empty(0, keys.head_dim)
        index.starts = torch.zeros(1, dtype=torch.int32)
        index.members = torch.empty(0, dtype=torch.int32)
        index.fold(device)
        return index

    def fold(self, device: torch.device = CPU) -> None:
        """Cluster the keys that are newer than the structure; the others stay as they are."""
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
            of_none = torch.full((last - first,), -1, dtype=torch.int32)
            cluster_of = torch.cat((self.estimate.cluster_of, of_none))
            self.estimate = ClusterValues(self.estimate.means, cluster_of)
        self.built = last

    def sum_values(self, values: Float[Tensor, "keys head_dim"]) -> None:
        """Keep the mean value of every cluster. Clusters that `fold` adds later have none, and are
        not estimated."""
        sizes = self.starts.diff().long()
        cluster = torch.arange(len(sizes)).repeat_interleave(sizes)
        sums = torch.zeros_like(self.means)
        sums.index_add_(0, cluster, values[self.members.long()].float())
        means = sums / sizes.clamp_min(1)[:, None]
        # used as they are stored
        self._estimate_by(_narrowed(means).float())

    def _estimate_by(self, means: Float[Tensor, "clusters head_dim"]) -> None:
        sizes = self.starts[: len(means) + 1].diff().long()
        cluster_of = torch.full((self.built,), -1, dtype=torch.int32)
        named = torch.arange(len(means), dtype=torch.int32).repeat_interleave(sizes)
        cluster_of[self.members[: len(named)].long()] = named
        self.estimate = ClusterValues(means.contiguous(), cluster_of)

    def structure(self) -> Arrays:
        found = {
            "means": _narrowed(self.means).numpy(),
            "starts": self.starts.numpy(),
            "members": self.members.numpy(),
        }
        if self.estimate is not None:
            found["value_means"] = _narrowed(self.estimate.means).numpy()
        return found

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
            index._estimate_by(values)
        return index


def cluster_keys(
    keys: KeyVectors, first: int, last: int, config: IndexConfig, device: torch.device = CPU
) -> tuple[Float[Tensor, "clusters head_dim"], Int[Tensor, " keys"]]:
    """Means of the clusters of keys ``first`` to ``last - 1``, and each key's cluster.

    Runs of ``config.span`` keys are clustered on their own; then every key goes to the best
    centroid of all. Clusters may end up empty; these are left out."""
    runs = keys.wide(device)[first:last].split(config.span)
    total = torch.stack([run.sum(0, dtype=torch.float64) for run in runs]).sum(0)
    centre = (total / (last - first)).float()
    directions = torch.cat([_spherical_means(run - centre, config) for run in runs])
    assigned = torch.cat([_nearest(run - centre, directions) for run in runs])
    sums = torch.zeros(len(directions), keys.head_dim, device=device)
    for run, best in zip(runs, assigned.split(config.span), strict=True):
        sums.index_add_(0, best, run)
    sizes = assigned.bincount(minlength=len(directions))
    kept = sizes > 0
    renumbered = kept.cumsum(0) - 1
    means = (sums[kept] / sizes[kept, None]).cpu()
    # judged as they are stored, so that a loaded index finds the same
    return _narrowed(means).float(), renumbered[assigned].cpu()


def _narrowed(means: Tensor) -> Tensor:
    narrow = means.to(torch.float16)
    return narrow if bool(torch.isfinite(narrow).all()) else means


def _spherical_means(run: Tensor, config: IndexConfig) -> Tensor:
    """Directions of about ``len(run) / cluster_size`` clusters; seeds are spread evenly."""
    count = max(1, len(run) // config.cluster_size)
    seeds = torch.linspace(0, len(run) - 1, count).round().long().to(run.device)
    directions = torch.nn.functional.normalize(run[seeds], dim=1)
    for _ in range(config.iterations):
        best = _nearest(run, directions)
        sums = torch.zeros_like(directions).index_add_(0, best, run)
        lone = best.bincount(minlength=count) == 0
        sums[lone] = directions[lone]
        directions = torch.nn.functional.normalize(sums, dim=1)
    return directions


def _nearest(run: Tensor, directions: Tensor) -> Tensor:
    tile = max(1, (1 << (26 if run.is_cuda else 22)) // len(directions))
    return torch.cat([(part @ directions.T).argmax(1) for part in run.split(tile)])
