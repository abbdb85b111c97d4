"""Rotation and the write to pages, as two assignments."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.page_dtypes import same_memory, to_pages
from looseleaf.ops.rotate.reference import rotate_wide
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
    has_slot = slots >= 0
    slots, frame_positions = slots[has_slot], frame_positions[has_slot]
    page_size = k_pages.shape[2]
    page, slot = slots // page_size, slots % page_size
    k_pages[page, :, slot] = to_pages(
        rotate_wide(k[has_slot], frame_positions, rotation), k_pages.dtype
    )
    if not same_memory(k_pages, v_pages):
        v_pages[page, :, slot] = to_pages(v[has_slot], v_pages.dtype)
