"""Scores of candidate pages per row and KV head, from one or two summary vectors per page.

With two vectors these are the largest and the least key (Quest, arXiv 2406.10774 §3.4). Vectors are
in the frame of the page's segment; the query is rotated to that frame."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.page_scores.reference import LayerRules, page_scores_reference
from looseleaf.ops.select_pages.candidate_list import CandidateList, PageScores
from looseleaf.ops.store_kv import NewRows

__all__ = ["LayerRules", "page_scores"]


def page_scores(
    q: Float[Tensor, "query_rows qo_heads head_dim"],
    vectors: Float[Tensor, "pages kv_heads width"],
    candidates: CandidateList,
    row_positions: Int[Tensor, " query_rows"],
    rules: LayerRules,
    run: int = 1,
    new: NewRows | None = None,
    implementation: Implementation = "auto",
) -> PageScores:
    """Scaled scores, the maximum over the query heads of a KV head, with maxima of runs of
    candidates.

    ``width`` is ``head_dim`` for one vector per page (score ``q . vector``), or twice that for two
    (score ``max(q, 0) . first + min(q, 0) . second``). Forced candidates (sink, recent) score
    ``inf``, pages outside the rule's window ``-inf``. Scores after a row's last candidate are
    undefined. ``run`` is a power of two up to 32, and
    runs of the result are at most as long. ``new`` rows are stored as by `store_kv`, on a GPU in
    the same launch: the vectors of candidates do not depend on them. Raises InvalidOption for an
    unknown ``implementation``."""
    if choose(implementation, q) == "triton":
        from looseleaf.ops.page_scores.kernel import page_scores_triton

        return page_scores_triton(q, vectors, candidates, row_positions, rules, run, new)
    if new is not None:
        new.store(rules.rotation, implementation)
    scores = page_scores_reference(q, vectors, candidates, row_positions, rules)
    return PageScores.of(scores, candidates, run)
