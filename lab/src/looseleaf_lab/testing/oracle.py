"""Attention as it is defined, row by row: keys turned to their true positions, softmax.

In fp64 it is the truth; in the dtype of the scene it is the plain low-precision implementation
whose error sets the budget of a kernel.
"""

import torch
from torch import Tensor

from looseleaf.types import AttnState
from looseleaf_lab.testing.scene import Placement, Reading, Scene, turned_at, visible_keys


def plain_attention(scene: Scene) -> AttnState:
    """The dense attention in the dtype of the scene, ``[samples, rows, …]``.

    One sample of a rounding error says little about its size. Attention does not change when rows
    and keys move together, but its rounding does: three moves are three samples.
    """
    states = [dense_attention(scene, scene.shape.dtype, shift) for shift in (0, 11, 23)]
    return AttnState(torch.stack([s.out for s in states]), torch.stack([s.lse for s in states]))


def dense_attention(scene: Scene, dtype: torch.dtype = torch.float64, shift: int = 0) -> AttnState:
    """The state of every row of the scene over all that it reads, computed in ``dtype``.

    ``shift`` moves rows and keys together before they turn.
    """
    oracle = _Oracle(scene, dtype, shift)
    states = [
        oracle.row([r for r in scene.readings if r.row == row], row)
        for row in range(len(scene.row_positions))
    ]
    return AttnState(torch.stack([s.out for s in states]), torch.stack([s.lse for s in states]))


class _Oracle:
    def __init__(self, scene: Scene, dtype: torch.dtype, shift: int) -> None:
        self.scene, self.dtype, self.shift = scene, dtype, shift
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.turned: dict[tuple[int, int], Tensor] = {}

    def row(self, readings: list[Reading], row: int) -> AttnState:
        scene, dtype, wide = self.scene, self.dtype, self.wide
        position, rule = scene.row_positions[row], scene.rule
        group = scene.shape.num_qo_heads // scene.shape.num_kv_heads
        k = torch.cat([self.keys(r.placement) for r in readings]).repeat_interleave(group, 1)
        v = torch.cat([r.placement.segment.v for r in readings]).repeat_interleave(group, 1)
        true = torch.cat([r.placement.offset + r.placement.segment.positions for r in readings])
        visible = torch.cat([visible_keys(scene, r) for r in readings]).repeat_interleave(group, 1)
        here = torch.tensor([position + self.shift], device=k.device)
        q = turned_at(
            scene.q[row : row + 1].to(wide), here, scene.frequencies, scene.shape.interleaved
        )[0].to(dtype)

        scores = (torch.einsum("hd,nhd->nh", q, k) * rule.softmax_scale).to(wide)
        if rule.soft_cap:
            scores = rule.soft_cap * (scores / rule.soft_cap).tanh()
        if rule.alibi_slopes is not None:
            scores = scores - rule.alibi_slopes.to(wide) * (position - true)[:, None]
        scores = scores.masked_fill(~visible, -torch.inf)
        lse = scores.logsumexp(0)
        weight = (scores - lse).exp().masked_fill(~visible, 0.0).to(dtype)
        return AttnState(torch.einsum("nh,nhd->hd", weight, v.to(dtype)), lse)

    def keys(self, placement: Placement) -> Tensor:
        """The keys of a segment at their true positions in the request."""
        at = (id(placement.segment), placement.offset)
        if at not in self.turned:
            true = placement.offset + placement.segment.positions
            k = placement.segment.k.to(self.wide)
            turned = turned_at(
                k, true + self.shift, self.scene.frequencies, self.scene.shape.interleaved
            )
            self.turned[at] = turned.to(self.dtype)
        return self.turned[at]
