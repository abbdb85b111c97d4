"""Page bounds as their definition."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.page_dtypes import FP8, widen


def page_bounds_reference(
    k_pages: Float[Tensor, "layers pages kv_heads page_size head_dim"],
    num_keys: Int[Tensor, " pages"],
) -> Float[Tensor, "layers pages kv_heads two_head_dims"]:
    """See `looseleaf.ops.page_bounds`."""
    slots = torch.arange(k_pages.shape[3], device=k_pages.device)
    unused = (slots >= num_keys[:, None])[:, None, :, None]  # [pages, 1, page_size, 1]
    # e4m3 has no infinities; each bound is one of the keys, so the cast back is exact
    keys = widen(k_pages) if k_pages.dtype is FP8 else k_pages
    largest = keys.masked_fill(unused, -torch.inf).amax(3)
    least = keys.masked_fill(unused, torch.inf).amin(3)
    return torch.cat([largest, least], -1).to(k_pages.dtype)
