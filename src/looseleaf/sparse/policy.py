"""A policy: a scorer, a budget, and the layers that stay dense."""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.select.anchors import Anchors
from looseleaf.attention.select.policy import Candidates, Choice, PagePolicy
from looseleaf.config import GroupRule, LayerBudgets
from looseleaf.kv.summaries import Summary
from looseleaf.sparse.budget import Budget
from looseleaf.sparse.choose import choose_pages, page_worth
from looseleaf.sparse.layers import Schedule


class Scorer:
    """Scores each page for each query head. Equal scorers give equal scores. The base reads no
    keys and needs no summary."""

    @property
    def summary(self) -> Summary | None:
        """The page summary that scores need, if any."""
        return None

    def looked(self, page_size: int, head_dim: int) -> int:
        """Numbers of a page's keys that the scores read besides the summary, per KV head."""
        return 0

    def scores(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Float[Tensor, "rows kv_heads group most"]:
        """Expected score of one key of each candidate, for each query head of a KV head, scaled as
        for the softmax: fp32, undefined for padding."""
        raise NotImplementedError


@dataclass(frozen=True)
class PageWorth:
    """Implements `Worth`: scores with mandatory pages and a mass budget applied. Policies that
    differ only in their number of pages have equal worths."""

    scorer: Scorer
    budget: Budget
    group: GroupRule

    @property
    def says_how_many(self) -> bool:
        return self.budget.mass is not None

    def looked(self, page_size: int, head_dim: int) -> int:
        return self.scorer.looked(page_size, head_dim)

    def of(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Float[Tensor, "rows kv_heads most"]:
        """See `page_worth`."""
        scores = self.scorer.scores(layer, q, candidates)
        return page_worth(scores, candidates, layer, self.budget, self.group)


@dataclass(frozen=True)
class SparsePolicy(PagePolicy):
    """Reads the pages with the largest scores.

    ``group`` is the agreement of a KV head's query heads: see `choose_pages`. ``layer_budgets``
    distributes the budget over the layers that are not dense: see `Schedule`. ``anchors`` are the
    layers whose choice serves the layers after them, None if every layer chooses.
    """

    scorer: Scorer
    budget: Budget
    dense_layers: frozenset[int] = frozenset()
    group: GroupRule = "max"
    layer_budgets: LayerBudgets = "flat"
    anchors: Anchors = None

    @property
    def summary(self) -> Summary | None:
        """The page summary that the scorer needs."""
        return self.scorer.summary

    @property
    def listed_budget(self) -> tuple[int, int]:
        """Sink and recent pages, by which a device list makes the choice."""
        return self.budget.sink, self.budget.recent

    @property
    def worth(self) -> PageWorth | None:
        """The page scores; None if they are the largest products of query heads and summaries."""
        if self.summary is not None and self.group == "max" and self.budget.mass is None:
            return None
        return PageWorth(self.scorer, replace(self.budget, pages=None, ratio=None), self.group)

    def limit(self, num_candidates: int, num_other: int) -> int:
        return self.budget.limit(num_candidates, num_other)

    def layer_limits(self, num_candidates: int, num_other: int, num_layers: int) -> list[int]:
        """The limit of every layer: mandatory pages in each, the rest of the budget distributed."""
        limit = self.limit(num_candidates, num_other)
        always = self.budget.sink + max(0, self.budget.recent - num_other)
        always = min(limit, max(1, always))
        schedule = Schedule(self.layer_budgets, self.dense_layers)
        spread = schedule.spread(limit - always, num_candidates - always, num_layers)
        return [always + count for count in spread]

    def choose(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Choice:
        """The pages with the largest scores, per row and KV head."""
        scores = self.scorer.scores(layer, q, candidates)
        choice = choose_pages(scores, candidates, layer, self.budget, self.group)
        size = candidates.pool.page_size
        return choice._replace(looked=self.scorer.looked(size, q.shape[-1]))
