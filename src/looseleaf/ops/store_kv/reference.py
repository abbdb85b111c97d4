"""Rotate and scatter, written as the two assignments that they are."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.page_dtypes import to_pages
from looseleaf.ops.rotate.reference import turn
from looseleaf.types import Rotation


def store_kv_reference(
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    frame_positions: Int[Tensor, " tokens"],
    slots: Int[Tensor, " tokens"],
    rotation: Rotation,
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
) -> None:
    """See `looseleaf.ops.store_kv`."""
    kept = slots >= 0
    slots, frame_positions = slots[kept], frame_positions[kept]
    page_size = k_pages.shape[2]
    page, slot = slots // page_size, slots % page_size
    k_pages[page, :, slot] = to_pages(turn(k[kept], frame_positions, rotation), k_pages.dtype)
    v_pages[page, :, slot] = to_pages(v[kept], v_pages.dtype)
