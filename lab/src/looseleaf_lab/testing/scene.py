"""A scene: segments, rows, and each row's reads of segments.

A scene has unrotated keys and true positions. Work lists and span lists of many forms (grouped or
not, split or not) are derived from it; the oracle uses none of them.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from looseleaf.types import AttnState, Rotation, ScoreRule


@dataclass(frozen=True)
class Shape:
    """Sizes, rules and features of a random scene."""

    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    rotary_dim: int | None = None
    interleaved: bool = False
    soft_cap: float = 0.0
    window: int = 0
    alibi: bool = False
    masks: bool = False
    patches: bool = False
    per_head: bool = False
    num_requests: int = 5
    num_documents: int = 4
    longest_document: int = 70
    longest_tail: int = 40
    most_rows: int = 30
    softmax_scale: float | None = None
    latent: bool = False
    """Keys are the values, in the dims that do not rotate."""


@dataclass(eq=False)
class Segment:
    """Keys and values ``[keys, kv_heads, head_dim]`` before any rotation, and their pages."""

    k: Tensor
    v: Tensor
    positions: Tensor
    explicit: bool
    pages: list[int] = field(default_factory=list)
    selected: list[list[int]] | None = None
    """For every KV head the ordinals of the pages to read; None: all."""

    @property
    def length(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, eq=False)
class Placement:
    """A segment in a request: its offset Δ and the frame positions hidden from the request."""

    segment: Segment
    offset: int
    hidden: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Reading:
    """One row's read of one placement, up to a bound on frame positions."""

    row: int
    placement: Placement
    bound: int


@dataclass(frozen=True, eq=False)
class Scene:
    """Queries and pages in the operators' form, and readings in the oracle's."""

    shape: Shape
    q: Tensor
    row_positions: list[int]
    readings: list[Reading]
    frequencies: Tensor
    rotation: Rotation
    rule: ScoreRule
    k_pages: Tensor
    v_pages: Tensor
    slot_positions: Tensor


def visible_keys(scene: Scene, reading: Reading) -> Tensor:
    """A mask ``[keys, kv_heads]`` of keys within bound, window and selection that are not
    hidden."""
    placement, segment = reading.placement, reading.placement.segment
    visible_positions = segment.positions < reading.bound
    if scene.rule.window:
        distance = scene.row_positions[reading.row] - placement.offset - segment.positions
        visible_positions = visible_positions & (distance < scene.rule.window)
    if placement.hidden:
        hidden = torch.tensor(sorted(placement.hidden), device=visible_positions.device)
        visible_positions = visible_positions & ~torch.isin(segment.positions, hidden)
    visible = visible_positions[:, None].repeat(1, scene.shape.num_kv_heads)
    if segment.selected is not None:
        ordinal = (
            torch.arange(segment.length, device=visible_positions.device) // scene.shape.page_size
        )
        for head, pages in enumerate(segment.selected):
            selected_pages = torch.tensor(pages, dtype=torch.long, device=visible_positions.device)
            visible[:, head] &= torch.isin(ordinal, selected_pages)
    return visible


def with_values(scene: Scene, state: AttnState) -> AttnState:
    """``state`` with zeros in dims without a value: the rotated ones, if keys are the values."""
    if not scene.shape.latent:
        return state
    out = state.out.clone()
    out[..., : scene.shape.rotary_dim] = 0.0
    return AttnState(out, state.lse)


def turned_at(x: Tensor, positions: Tensor, frequencies: Tensor, interleaved: bool) -> Tensor:
    """``x`` rotated by RoPE as a product of complex numbers, in its own dtype, from fp64 angles."""
    angles = positions.to(torch.float64)[:, None, None] * frequencies
    unit = torch.polar(torch.ones_like(angles), angles)
    unit = unit.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
    width = 2 * len(frequencies)
    if not width:
        return x
    rotary_dims, rest = x[..., :width], x[..., width:]
    pairs = rotary_dims.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    if not interleaved:
        pairs = pairs.transpose(-1, -2)
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * unit)
    if not interleaved:
        product = product.transpose(-1, -2)
    return torch.cat([product.flatten(-2).to(x.dtype), rest], -1)


def rotation_table(
    frequencies: Tensor, num_positions: int, interleaved: bool, dtype: torch.dtype = torch.float32
) -> Rotation:
    """The rotation table of these frequencies, from fp64 angles."""
    positions = torch.arange(num_positions, device=frequencies.device, dtype=torch.float64)
    angles = positions[:, None] * frequencies
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), interleaved)
