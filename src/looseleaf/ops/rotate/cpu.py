"""Rotation on the CPU, split in two: angles once per step, then a few whole-tensor operations per
layer.

Sines carry the sign of the pairing, so that turning is ``x * cos + partner(x) * sin`` with no
slicing when all dims turn. Answers to `rotate_reference`. """

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.types import Rotation


@dataclass(frozen=True)
class Turn:
    """The angles of some positions: full-width cosines and signed sines, fp32 ``[tokens, 1,
    rotary_dim]``.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


def make_turn(positions: Int[Tensor, " tokens"], rotation: Rotation) -> Turn:
    """The angles of ``positions``; negative ones (rows before a frame, which see none of it) count
    as 0.
    """
    index = positions.clamp_min(0)
    cos, sin = rotation.cos.index_select(0, index), rotation.sin.index_select(0, index)
    if rotation.interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    else:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return Turn(cos[:, None], sin[:, None], rotation.interleaved)


def turn_heads(
    x: Float[Tensor, "tokens heads head_dim"], turn: Turn
) -> Float[Tensor, "tokens heads head_dim"]:
    """``x`` turned by the angles of its tokens; computed in fp32, returned in the dtype of ``x``.
    """
    rotary_dim = turn.cos.shape[-1]
    head = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    wide = head.float()
    if turn.interleaved:
        partner = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = wide.roll(rotary_dim // 2, -1)
    turned = torch.addcmul(wide * turn.cos, partner, turn.sin).to(x.dtype)
    if rotary_dim == x.shape[-1]:
        return turned
    return torch.cat([turned, x[..., rotary_dim:]], -1)
