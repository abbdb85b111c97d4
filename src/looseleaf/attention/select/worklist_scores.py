"""How the pages of a list are scored on the device: by products with what is kept of them, or by
tensors of a policy's own, where query heads agree by more than the largest product, a budget is a
mass, or nothing is kept of pages."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from looseleaf.attention.select.attend_pages import SelectedRows
from looseleaf.attention.select.candidates import PagePolicy
from looseleaf.attention.select.worklist_candidates import ListedCandidates, Worth, no_table
from looseleaf.kv.pool import PagePool
from looseleaf.kv.summaries import PageSummaries
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.page_scores import LayerRules, page_scores
from looseleaf.ops.select_pages import CandidateList, PageScores
from looseleaf.ops.store_kv import NewRows, store_kv
from looseleaf.types import Rotation, ScoreRule


@runtime_checkable
class Listed(Protocol):
    """A policy that may choose the pages that are worth most, with so many pages of the sink and
    recent ones; the budget is None if it does not. They are scored by the largest products of a
    query head and what is kept of a page, or by ``worth``, a `Worth`."""

    @property
    def listed_budget(self) -> tuple[int, int] | None: ...

    @property
    def worth(self) -> object: ...


class Scored(NamedTuple):
    """How pages are scored: by what is kept of them, the first ``sink`` first; or by ``worth``."""

    summaries: PageSummaries | None
    rotations: Sequence[Rotation]
    rules: Sequence[ScoreRule]
    pool: PagePool
    sink: int
    policy: PagePolicy
    worth: Worth | None

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
        """The scores of a layer, whose unrotated queries are ``q``; stores ``new`` rows."""
        if self.worth is None:
            assert self.summaries is not None, "pages are scored by what is kept of them"
            rules = LayerRules(self.rotations[layer], self.rules[layer], self.pool.page_size)
            vectors = self.summaries.layer(layer)
            return page_scores(q, vectors, listed, positions, rules, run, new, implementation)
        if new is not None:
            store_kv(*new[:4], self.rotations[layer], *new[4:], implementation=implementation)
        shown = self.pool, self.rotations, self.rules, self.summaries
        seen = ListedCandidates((), self.policy, no_table, *shown, listed, positions)
        worth = self.worth.of(layer, q[listed.row.clamp_min(0)], seen)
        return PageScores.of(worth.contiguous(), listed, run)


def worth_of(policy: object) -> Worth | None:
    """What pages are worth to a policy, if it says."""
    worth = policy.worth if isinstance(policy, Listed) else None
    return worth if isinstance(worth, Worth) else None


def says_how_many(policy: object) -> bool:
    """Whether the device has to tell how many pages are read."""
    worth = worth_of(policy)
    return worth is not None and worth.says_how_many


def choosing_on_device(selected: Sequence[object]) -> SelectedRows | None:
    """The rows that choose, if a list on the device can tell what, all under one policy."""
    if len(selected) != 1 or not isinstance(selected[0], SelectedRows):
        return None
    policy = selected[0].policy
    if not isinstance(policy, Listed) or policy.listed_budget is None:
        return None
    measured = any(row.measured for row in selected[0].candidates.rows)
    return None if measured else selected[0]
