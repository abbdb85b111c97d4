"""The least and the largest key of a page, dim by dim: what Quest (arXiv 2406.10774 §3.4) keeps of
it.

Keys are as they are stored, in the frame of their segment, so bounds hold wherever it stands."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.page_bounds.reference import page_bounds_reference


def page_bounds(
    k_pages: Float[Tensor, "layers pages kv_heads page_size head_dim"],
    num_keys: Int[Tensor, " pages"],
    implementation: Implementation = "auto",
) -> Float[Tensor, "layers pages kv_heads two_head_dims"]:
    """Largest, then least element of the first ``num_keys`` keys of every page, in their dtype.

    A page has at least one key. For a query ``q`` the score of none of them is above
    ``max(q, 0) . largest + min(q, 0) . least``."""
    if choose(implementation, k_pages) == "triton":
        from looseleaf.ops.page_bounds.kernel import page_bounds_triton

        return page_bounds_triton(k_pages, num_keys)
    return page_bounds_reference(k_pages, num_keys)
