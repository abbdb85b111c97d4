"""Gather and rotate as two assignments."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.page_dtypes import same_memory, to_pages, widen
from looseleaf.ops.rotate.reference import rotate_wide
from looseleaf.types import Rotation


def gather_kv_reference(
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    slots: Int[Tensor, " keys"],
    turns: Int[Tensor, " keys"],
    rotation: Rotation,
    k_gathered: Float[Tensor, "gathered kv_heads gathered_size head_dim"],
    v_gathered: Float[Tensor, "gathered kv_heads gathered_size head_dim"],
) -> None:
    """See `looseleaf.ops.gather_kv`."""
    key = torch.nonzero(slots >= -1)[:, 0]
    slots, turns = slots[key], turns[key]
    has_source = (slots >= 0)[:, None, None]
    page, slot = slots.clamp(min=0) // k_pages.shape[2], slots.clamp(min=0) % k_pages.shape[2]
    page_out, slot_out = key // k_gathered.shape[2], key % k_gathered.shape[2]
    k = rotate_wide(widen(k_pages[page, :, slot]), turns.clamp(min=0), rotation)
    k_gathered[page_out, :, slot_out] = to_pages(torch.where(has_source, k, 0.0), k_gathered.dtype)
    if same_memory(k_gathered, v_gathered):
        return
    v = widen(v_pages[page, :, slot])
    v_gathered[page_out, :, slot_out] = to_pages(torch.where(has_source, v, 0.0), v_gathered.dtype)
