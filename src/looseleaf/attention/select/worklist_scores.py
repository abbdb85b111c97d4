"""Scores of listed pages on the device: products with page summaries, or tensors of a policy.

Tensors serve policies whose heads agree by more than a maximum, whose budget is a mass, or which
have no summaries."""

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
    """A policy that may select the top pages of a list. ``listed_budget`` is the number of sink and
    recent pages, None if it does not. Pages are scored by the largest product of a query head and
    a summary, or by ``worth``, a `Worth`."""

    @property
    def listed_budget(self) -> tuple[int, int] | None: ...

    @property
    def worth(self) -> object: ...


class Scored(NamedTuple):
    """How pages are scored: by summaries, after the first ``sink`` pages; or by ``worth``."""

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
        """The scores of ``layer`` for unrotated queries ``q``; stores the ``new`` rows."""
        if self.worth is None:
            assert self.summaries is not None, "product scores need page summaries"
            rules = LayerRules(self.rotations[layer], self.rules[layer], self.pool.page_size)
            vectors = self.summaries.layer(layer)
            return page_scores(q, vectors, listed, positions, rules, run, new, implementation)
        if new is not None:
            store_kv(*new[:4], self.rotations[layer], *new[4:], implementation=implementation)
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


def worth_of(policy: object) -> Worth | None:
    """The policy's own page scores, None if summaries score its pages."""
    worth = policy.worth if isinstance(policy, Listed) else None
    return worth if isinstance(worth, Worth) else None


def says_how_many(policy: object) -> bool:
    """Whether only the device has the number of pages that are read."""
    worth = worth_of(policy)
    return worth is not None and worth.says_how_many


def choosing_on_device(selected: Sequence[object]) -> SelectedRows | None:
    """The choosing rows, if all have one policy that selects on the device; None otherwise."""
    if len(selected) != 1 or not isinstance(selected[0], SelectedRows):
        return None
    policy = selected[0].policy
    if not isinstance(policy, Listed) or policy.listed_budget is None:
        return None
    measured = any(row.measured for row in selected[0].candidates.rows)
    return None if measured else selected[0]
