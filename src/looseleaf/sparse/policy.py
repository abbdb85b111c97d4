"""A policy: a scorer, a budget, and the layers that stay dense."""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.select.candidates import Candidates, Choice
from looseleaf.config import GroupRule, LayerBudgets
from looseleaf.kv.summaries import Summary
from looseleaf.sparse.budget import Budget
from looseleaf.sparse.choose import choose_pages, page_worth
from looseleaf.sparse.layers import Schedule


@runtime_checkable
class Scorer(Protocol):
    """Says how much each query head wants each page. Equal scorers give equal scores."""

    @property
    def summary(self) -> Summary | None:
        """What it must know of every page."""
        ...

    def looked(self, page_size: int, head_dim: int) -> int:
        """How many numbers of a page's keys it looks at, for a KV head."""
        ...

    def scores(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Float[Tensor, "rows kv_heads group most"]:
        """What each query head of a KV head expects of each candidate, as the score of one of its
        keys (scaled, as the softmax takes it): fp32, anything where there is no candidate."""
        ...


@dataclass(frozen=True)
class PageWorth:
    """What a scorer, a budget's mass and what it reads in any case make of pages; implements
    `Worth`. Policies that differ in how many pages they read have the same."""

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
class SparsePolicy:
    """Reads the pages with the largest scores; implements `PagePolicy`.

    ``group`` is how the query heads of a KV head agree: see `choose_pages`. ``layer_budgets`` say
    how the budget is spread over the layers that are not dense: see `Schedule`.
    """

    scorer: Scorer
    budget: Budget
    dense_layers: frozenset[int] = frozenset()
    group: GroupRule = "max"
    layer_budgets: LayerBudgets = "flat"

    @property
    def summary(self) -> Summary | None:
        """What the scorer must know of every page."""
        return self.scorer.summary

    @property
    def listed_budget(self) -> tuple[int, int]:
        """Pages of the sink and recent ones: a work list on a device can tell what is chosen."""
        return self.budget.sink, self.budget.recent

    @property
    def worth(self) -> PageWorth | None:
        """What pages are chosen by; None if it is the largest products of a query head and what is
        kept of a page."""
        if self.summary is not None and self.group == "max" and self.budget.mass is None:
            return None
        return PageWorth(self.scorer, replace(self.budget, pages=None, ratio=None), self.group)

    def limit(self, num_candidates: int, num_other: int) -> int:
        return self.budget.limit(num_candidates, num_other)

    def layer_limits(self, num_candidates: int, num_other: int, num_layers: int) -> list[int]:
        """Its limit in every layer: what is read in any case is read in all, and what the budget
        holds besides is spread."""
        limit = self.limit(num_candidates, num_other)
        always = self.budget.sink + max(0, self.budget.recent - num_other)
        always = min(limit, max(1, always))
        schedule = Schedule(self.layer_budgets, self.dense_layers)
        spread = schedule.spread(limit - always, num_candidates - always, num_layers)
        return [always + count for count in spread]

    def choose(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Choice:
        """The pages that are wanted most, per row and KV head."""
        scores = self.scorer.scores(layer, q, candidates)
        choice = choose_pages(scores, candidates, layer, self.budget, self.group)
        size = candidates.pool.page_size
        return choice._replace(looked=self.scorer.looked(size, q.shape[-1]))
