"""RoPE as its equation: each pair of dims is a point in the plane, rotated by an angle."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.types import Rotation


def rotate_reference(
    x: Float[Tensor, "tokens heads head_dim"],
    positions: Int[Tensor, " tokens"],
    rotation: Rotation,
) -> Float[Tensor, "tokens heads head_dim"]:
    """See `looseleaf.ops.rotate`."""
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < len(
        rotation.cos
    ):
        raise InvalidOption(
            f"positions {int(positions.min())} to {int(positions.max())} are not all in a table of "
            f"{len(rotation.cos)}: make the rotation table longer"
        )
    return rotate_wide(x, positions, rotation).to(x.dtype)


def rotate_wide(
    x: Float[Tensor, "tokens heads head_dim"],
    positions: Int[Tensor, " tokens"],
    rotation: Rotation,
) -> Float[Tensor, "tokens heads head_dim"]:
    """The rotation without rounding: fp32, or fp64 for fp64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    cos = rotation.cos[positions].to(x.dtype)[:, None]
    sin = rotation.sin[positions].to(x.dtype)[:, None]
    pairs, rest = x[..., : rotation.rotary_dim], x[..., rotation.rotary_dim :]
    if rotation.interleaved:
        a, b = pairs[..., 0::2], pairs[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = pairs.chunk(2, -1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([rotated, rest], -1)
