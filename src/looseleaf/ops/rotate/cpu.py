"""RoPE on the CPU: a full-width table once, its rows once per step, then few operations per layer.

Sines carry the sign of the pairing: the rotation is ``x * cos + partner(x) * sin`` without slices
if all dims rotate. `rotate_reference` defines the result."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.types import Rotation


@dataclass(frozen=True)
class Angles:
    """Cosines and signed sines at full width for some positions, fp32 ``[tokens, 1, rotary_dim]``.

    Angles of the same tokens in several frames have a leading dim of frames."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def stack(cls, frames: "Sequence[Angles]") -> "Angles":
        """The angles of several frames, ``[frames, tokens, 1, rotary_dim]``."""
        cos, sin = (
            torch.stack(columns) for columns in zip(*((t.cos, t.sin) for t in frames), strict=True)
        )
        return cls(cos, sin, frames[0].interleaved)


@dataclass(frozen=True)
class AngleTable:
    """A full-width `Rotation`: ``cos`` and signed ``sin``, fp32 ``[positions, 1, rotary_dim]``."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def create(cls, rotation: Rotation) -> "AngleTable":
        """The table of ``rotation``, on its device."""
        cos, sin = rotation.cos, rotation.sin
        # negated in place: the table of a long context takes a gigabyte
        if rotation.interleaved:
            cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
            sin[:, ::2].neg_()
        else:
            cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
            sin[:, : sin.shape[1] // 2].neg_()
        return cls(cos[:, None], sin[:, None], rotation.interleaved)

    def at(self, positions: Int[Tensor, " tokens"]) -> Angles:
        """The angles of ``positions``, which are not negative."""
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        return Angles(cos, sin, self.interleaved)


def rotate_heads(
    x: Float[Tensor, "tokens heads head_dim"], angles: Angles
) -> Float[Tensor, "*frames tokens heads head_dim"]:
    """``x`` rotated by the angles of its tokens in every frame; fp32 inside, the dtype of ``x``
    outside."""
    rotary_dim = angles.cos.shape[-1]
    head = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    wide = head.float()
    if angles.interleaved:
        partner = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = wide.roll(rotary_dim // 2, -1)
    rotated = torch.addcmul(wide * angles.cos, partner, angles.sin).to(x.dtype)
    if rotary_dim == x.shape[-1]:
        return rotated
    rest = x[..., rotary_dim:].expand(*rotated.shape[:-1], -1)
    return torch.cat([rotated, rest], -1)
