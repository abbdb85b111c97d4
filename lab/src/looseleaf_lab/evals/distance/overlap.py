"""Attention that a layer loses by reading the pages of another layer's choice.

Decode rows of given answers choose in every layer, and each layer's attention over all candidates
is computed besides. So one pass has the loss of every pair of layers. Anchors are the layers with
the least sum of losses, by dynamic programming (Kascade, arXiv 2512.16391)."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.select.attend_pages import key_scores
from looseleaf.attention.select.policy import Candidates, Choice, PagePolicy
from looseleaf.engine.features import SelectedPages
from looseleaf.engine.sequence import Sequence as OneOutput
from looseleaf.kv.summaries import Summary

Losses = npt.NDArray[np.float64]
"""``[layers, layers]``: the attention that the second layer loses by the first one's choice."""


@dataclass(eq=False)
class OverlapPolicy(PagePolicy):
    """Chooses as ``base`` in every layer, and adds up the attention that each choice holds.

    ``mass[a, b]`` is the sum over rows of the share of layer b's attention over candidates that the
    pages of layer a hold, as the mean over KV heads."""

    base: PagePolicy
    num_layers: int
    mass: npt.NDArray[np.float64] = field(init=False)
    rows: int = 0
    _choices: dict[int, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mass = np.zeros((self.num_layers, self.num_layers))

    @property
    def dense_layers(self) -> Container[int]:
        return self.base.dense_layers

    @property
    def summary(self) -> Summary | None:
        return self.base.summary

    def limit(self, num_candidates: int, num_other: int) -> int:
        """The base's."""
        return self.base.limit(num_candidates, num_other)

    def layer_limits(self, num_candidates: int, num_other: int, num_layers: int) -> Sequence[int]:
        return self.base.layer_limits(num_candidates, num_other, num_layers)

    def choose(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Choice:
        """The base's choice, compared with those of earlier layers."""
        if not self._choices or layer <= max(self._choices):
            self._choices, self.rows = {}, self.rows + len(q)
        choice = self.base.choose(layer, q, candidates)
        self._choices[layer] = choice
        mass = _page_mass(layer, q, candidates)
        for other, chosen in self._choices.items():
            self.mass[other, layer] += float(_held(mass, chosen))
        return choice

    def losses(self) -> Losses:
        """The mean loss of every pair, nan where no row chose."""
        own = np.diag(self.mass)
        losses = (own[None, :] - self.mass) / max(1, self.rows)
        losses[:, own == 0] = np.nan
        losses[own == 0] = np.nan
        return losses


def _page_mass(
    layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
) -> Float[Tensor, "rows kv_heads pages"]:
    """The share of each candidate in a layer's attention over candidates, as a mean over heads."""
    scores = key_scores(layer, q, candidates.everything(), candidates).transpose(2, 3)
    shares = scores.flatten(3).softmax(-1).nan_to_num(0.0)
    mass: Tensor = shares.unflatten(3, scores.shape[3:]).sum(-1).mean(2)
    return mass


def _held(mass: Float[Tensor, "rows kv_heads pages"], choice: Choice) -> Tensor:
    """The sum over rows of the mass of chosen pages, as a mean over KV heads."""
    column = torch.arange(choice.ordinals.shape[-1], device=mass.device)
    own = mass.gather(-1, choice.ordinals) * (column < choice.counts[..., None])
    return own.sum(-1).mean(-1).sum()


def watch(sequence: OneOutput, policy: OverlapPolicy) -> None:
    """Let a waiting sequence choose its pages by ``policy``."""
    sequence.features[:] = [
        replace(feature, policy=policy) if isinstance(feature, SelectedPages) else feature
        for feature in sequence.features
    ]


def best_anchors(losses: Losses, layers: Sequence[int], count: int) -> tuple[int, ...]:
    """The ``count`` anchors among ``layers`` whose choices lose least over all of them.

    A layer reads the choice of the last anchor before it; so the first layer is an anchor."""
    num = len(layers)
    # cost[i, j]: layer i is an anchor, and serves the layers up to j, without j
    cost = np.zeros((num, num + 1))
    for first in range(num):
        served = losses[layers[first], list(layers[first:])]
        cost[first, first + 1 :] = np.cumsum(served)
    least = np.full((count + 1, num + 1), np.inf)
    least[0, num] = 0.0
    following = np.zeros((count + 1, num + 1), dtype=int)
    for used in range(1, count + 1):
        for first in range(num):
            sums = cost[first, first + 1 :] + least[used - 1, first + 1 :]
            following[used, first] = first + 1 + int(sums.argmin())
            least[used, first] = sums.min()
    anchors, at = [], 0
    for used in range(count, 0, -1):
        anchors.append(layers[at])
        at = following[used, at]
    return tuple(anchors)
