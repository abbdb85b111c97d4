"""Rotation on the CPU, split in three: a full-width table once, angles once per step, then a few
whole-tensor operations per layer.

Sines carry the sign of the pairing, so that turning is ``x * cos + partner(x) * sin`` with no
slicing when all dims turn. Answers to `rotate_reference`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.types import Rotation


@dataclass(frozen=True)
class Turn:
    """The angles of some positions: full-width cosines and signed sines, fp32 ``[tokens, 1,
    rotary_dim]``, or of the same tokens in several frames, with a leading dim."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def stack(cls, turns: "Sequence[Turn]") -> "Turn":
        """The angles of several frames, ``[frames, tokens, 1, rotary_dim]``."""
        cos, sin = (
            torch.stack(columns) for columns in zip(*((t.cos, t.sin) for t in turns), strict=True)
        )
        return cls(cos, sin, turns[0].interleaved)


@dataclass(frozen=True)
class TurnTable:
    """A `Rotation` at full width: ``cos`` and signed ``sin``, fp32 ``[positions, 1,
    rotary_dim]``.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def create(cls, rotation: Rotation) -> "TurnTable":
        """The table of ``rotation``, on its device."""
        cos, sin = rotation.cos, rotation.sin
        # in place, since the tables of a long context take a gigabyte
        if rotation.interleaved:
            cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
            sin[:, ::2].neg_()
        else:
            cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
            sin[:, : sin.shape[1] // 2].neg_()
        return cls(cos[:, None], sin[:, None], rotation.interleaved)

    def at(self, positions: Int[Tensor, " tokens"]) -> Turn:
        """The angles of ``positions``, none of them negative."""
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        return Turn(cos, sin, self.interleaved)


def turn_heads(
    x: Float[Tensor, "tokens heads head_dim"], turn: Turn
) -> Float[Tensor, "*frames tokens heads head_dim"]:
    """``x`` turned by the angles of its tokens, in every frame that ``turn`` has; computed in fp32,
    returned in the dtype of ``x``.
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
    rest = x[..., rotary_dim:].expand(*turned.shape[:-1], -1)
    return torch.cat([turned, rest], -1)
