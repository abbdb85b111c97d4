"""Bounds of a page: the largest and the least key per dim, the page summary of Quest (arXiv
2406.10774 §3.4).

Keys are in the frame of their segment, so bounds hold at any offset of the segment."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.page_bounds.reference import page_bounds_reference


def page_bounds(
    k_pages: Float[Tensor, "layers pages kv_heads page_size head_dim"],
    num_keys: Int[Tensor, " pages"],
    implementation: Implementation = "auto",
) -> Float[Tensor, "layers pages kv_heads two_head_dims"]:
    """Largest, then least element over the first ``num_keys`` keys of every page, in their dtype.

    Every page has at least one key. The score of each key for a query ``q`` is at most ``max(q, 0)
    . largest + min(q, 0) . least``. Raises InvalidOption for an unknown ``implementation``."""
    if choose(implementation, k_pages) == "triton":
        from looseleaf.ops.page_bounds.kernel import page_bounds_triton

        return page_bounds_triton(k_pages, num_keys)
    return page_bounds_reference(k_pages, num_keys)
