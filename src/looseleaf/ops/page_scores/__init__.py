"""How much each KV head of a row wants each of its candidate pages, from what is kept of a page.

That is one vector, or two (largest and least key; Quest, arXiv 2406.10774 §3.4), in the frame of
the page's segment; the query comes to the frame."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.page_scores.reference import page_scores_reference
from looseleaf.ops.select_pages.candidate_list import CandidateList, PageScores
from looseleaf.ops.store_kv import NewRows, store_kv
from looseleaf.types import Rotation, ScoreRule


def page_scores(
    q: Float[Tensor, "query_rows qo_heads head_dim"],
    vectors: Float[Tensor, "pages kv_heads width"],
    candidates: CandidateList,
    row_positions: Int[Tensor, " query_rows"],
    how: tuple[Rotation, ScoreRule, int],
    run: int = 1,
    new: NewRows | None = None,
    implementation: Implementation = "auto",
) -> PageScores:
    """The scaled scores: the largest over the query heads of a KV head; and maxima of runs of
    ``run`` candidates, a power of two up to 32.

    ``how`` is the rotation, the layer's rule and the page size. ``width`` is ``head_dim`` (a score
    is the product with the vector) or twice that (``max(q, 0) . first + min(q, 0) . second``). What
    must be chosen scores ``inf``, a page with no key in the rule's window ``-inf``; where a row has
    no candidate there is anything. ``new`` rows are stored on the way, as by `store_kv`, in the
    same launch on a GPU: what is kept of candidates is final."""
    if choose(implementation, q) == "triton":
        from looseleaf.ops.page_scores.kernel import page_scores_triton

        return page_scores_triton(q, vectors, candidates, row_positions, how, run, new)
    if new is not None:
        store_kv(*new[:4], how[0], *new[4:], implementation=implementation)
    scores = page_scores_reference(q, vectors, candidates, row_positions, how)
    return PageScores.of(scores, candidates, run)
