"""Scores of listed pages on the device: products with page summaries, or tensors of a policy.

Tensors serve policies whose heads agree by more than a maximum, whose budget is a mass, or which
have no summaries."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from looseleaf.attention.select.policy import Candidates, PagePolicy, Worth
from looseleaf.attention.select.worklist_candidates import ListedCandidates, no_table
from looseleaf.kv.pool import PagePool
from looseleaf.kv.summaries import PageSummaries
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.page_scores import LayerRules, page_scores
from looseleaf.ops.select_pages import CandidateList, PageScores
from looseleaf.ops.store_kv import NewRows
from looseleaf.types import Rotation, ScoreRule


class Scored(NamedTuple):
    """How pages are scored: by summaries, after the first ``sink`` pages; or by ``worth``."""

    summaries: PageSummaries | None
    rotations: Sequence[Rotation]
    rules: Sequence[ScoreRule]
    pool: PagePool
    sink: int
    policy: PagePolicy
    worth: Worth | None

    @classmethod
    def of(cls, policy: PagePolicy, candidates: Candidates, sink: int) -> "Scored":
        """The scores of the candidates of ``policy``."""
        return cls(
            candidates.summaries,
            candidates.rotations,
            candidates.rules,
            candidates.pool,
            sink,
            policy,
            policy.worth,
        )

    def pages(
        self,
        layer: int,
        q: Tensor,
        listed: CandidateList,
        positions: Tensor,
        run: int,
        new: NewRows | None,
        implementation: Implementation,
    ) -> PageScores:
        """The scores of ``layer`` for unrotated queries ``q``; stores the ``new`` rows."""
        if self.worth is None:
            assert self.summaries is not None, "product scores need page summaries"
            rules = LayerRules(self.rotations[layer], self.rules[layer], self.pool.page_size)
            vectors = self.summaries.layer(layer)
            return page_scores(q, vectors, listed, positions, rules, run, new, implementation)
        if new is not None:
            new.store(self.rotations[layer], implementation)
        candidates = ListedCandidates(
            (),
            self.policy,
            no_table,
            self.pool,
            self.rotations,
            self.rules,
            self.summaries,
            listed,
            positions,
        )
        worth = self.worth.of(layer, q[listed.row.clamp_min(0)], candidates)
        return PageScores.of(worth.contiguous(), listed, run)
