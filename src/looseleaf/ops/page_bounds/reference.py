"""Page bounds, written as their definition."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def page_bounds_reference(
    k_pages: Float[Tensor, "layers pages kv_heads page_size head_dim"],
    num_keys: Int[Tensor, " pages"],
) -> Float[Tensor, "layers pages kv_heads two_head_dims"]:
    """See `looseleaf.ops.page_bounds`."""
    slots = torch.arange(k_pages.shape[3], device=k_pages.device)
    unused = (slots >= num_keys[:, None])[:, None, :, None]  # [pages, 1, page_size, 1]
    largest = k_pages.masked_fill(unused, -torch.inf).amax(3)
    least = k_pages.masked_fill(unused, torch.inf).amin(3)
    return torch.cat([largest, least], -1)
