"""Attention by definition, row by row: keys rotated to their true positions, softmax.

In fp64 it is the truth. In the dtype of the scene its error sets the budget of a kernel.
"""

import torch
from torch import Tensor

from looseleaf.types import AttnState
from looseleaf_lab.testing.scene import Placement, Reading, Scene, turned_at, visible_keys


def plain_attention(scene: Scene) -> AttnState:
    """Dense attention in the dtype of the scene, ``[samples, rows, …]``.

    One sample of a rounding error is a poor estimate of its size. A common shift of rows and keys
    changes only the rounding of attention, so three shifts give three samples.
    """
    states = [dense_attention(scene, scene.shape.dtype, shift) for shift in (0, 11, 23)]
    return AttnState(torch.stack([s.out for s in states]), torch.stack([s.lse for s in states]))


def dense_attention(scene: Scene, dtype: torch.dtype = torch.float64, shift: int = 0) -> AttnState:
    """The state of every row of the scene over all its readings, computed in ``dtype``.

    ``shift`` moves rows and keys together before the rotation.
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
        self.rotated_keys: dict[tuple[int, int], Tensor] = {}

    def row(self, readings: list[Reading], row: int) -> AttnState:
        scene, dtype, wide = self.scene, self.dtype, self.wide
        position, rule = scene.row_positions[row], scene.rule
        group = scene.shape.num_qo_heads // scene.shape.num_kv_heads
        k = torch.cat([self.keys(r.placement) for r in readings]).repeat_interleave(group, 1)
        v = torch.cat([r.placement.segment.v for r in readings]).repeat_interleave(group, 1)
        true_positions = torch.cat(
            [r.placement.offset + r.placement.segment.positions for r in readings]
        )
        visible = torch.cat([visible_keys(scene, r) for r in readings]).repeat_interleave(group, 1)
        query_position = torch.tensor([position + self.shift], device=k.device)
        q = turned_at(
            scene.q[row : row + 1].to(wide),
            query_position,
            scene.frequencies,
            scene.shape.interleaved,
        )[0].to(dtype)

        scores = (torch.einsum("hd,nhd->nh", q, k) * rule.softmax_scale).to(wide)
        if rule.soft_cap:
            scores = rule.soft_cap * (scores / rule.soft_cap).tanh()
        if rule.alibi_slopes is not None:
            scores = scores - rule.alibi_slopes.to(wide) * (position - true_positions)[:, None]
        scores = scores.masked_fill(~visible, -torch.inf)
        lse = scores.logsumexp(0)
        weight = (scores - lse).exp().masked_fill(~visible, 0.0).to(dtype)
        return AttnState(torch.einsum("nh,nhd->hd", weight, v.to(dtype)), lse)

    def keys(self, placement: Placement) -> Tensor:
        """The keys of a segment at their true positions in the request."""
        cache_key = (id(placement.segment), placement.offset)
        if cache_key not in self.rotated_keys:
            true_positions = placement.offset + placement.segment.positions
            k = placement.segment.k.to(self.wide)
            rotated_keys = turned_at(
                k, true_positions + self.shift, self.scene.frequencies, self.scene.shape.interleaved
            )
            self.rotated_keys[cache_key] = rotated_keys.to(self.dtype)
        return self.rotated_keys[cache_key]
