"""Scores of listed pages on the device: products with page summaries, or tensors of a policy.

Tensors serve policies whose heads agree by more than a maximum, whose budget is a mass, or which
have no summaries. They read candidates in a device list at fixed addresses, by the interface of
`Candidates`. All shapes are fixed, so such policies run in a captured step too."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from looseleaf.attention.select.candidates import CandidateTable
from looseleaf.attention.select.policy import Candidates, PagePolicy, SelectingRow, Worth
from looseleaf.kv.pool import PagePool
from looseleaf.kv.summaries import PageSummaries
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.page_scores import LayerRules, page_scores
from looseleaf.ops.select_pages import CandidateList, PageScores
from looseleaf.ops.store_kv import NewRows
from looseleaf.types import Rotation, ScoreRule


@dataclass(frozen=True, eq=False)
class ListedTable(CandidateTable):
    """The table of ``listed`` candidates; spans are numbered ``most_spans`` a row."""

    listed: CandidateList

    @cached_property
    def pages(self) -> Int[Tensor, "rows most"]:
        return self.listed.pages.long()

    @cached_property
    def starts(self) -> Int[Tensor, "rows most"]:
        return self.listed.starts.long()

    @cached_property
    def spans(self) -> Int[Tensor, "rows most"]:
        rows = torch.arange(len(self.listed.spans), device=self.device)
        return self.listed.spans + (rows * self.most_spans)[:, None]

    @cached_property
    def num_pages(self) -> Int[Tensor, " rows"]:
        return self.listed.num_pages

    @cached_property
    def span_row(self) -> Int[Tensor, " spans"]:
        rows, spans = self.listed.span_offset.shape
        return torch.arange(rows, device=self.device)[:, None].expand(-1, spans).reshape(-1)

    @cached_property
    def span_offset(self) -> Int[Tensor, " spans"]:
        return self.listed.span_offset.flatten().long()

    @cached_property
    def span_bound(self) -> Int[Tensor, " spans"]:
        return self.listed.span_bound.flatten()

    @property
    def most_spans(self) -> int:
        return self.listed.span_offset.shape[1]


def no_table(rows: Sequence[SelectingRow]) -> NoReturn:
    """Raises AssertionError: a list has a single table."""
    raise AssertionError("a device list has a single table, without rows")


@dataclass(frozen=True, eq=False)
class ListedCandidates(Candidates):
    """The candidates of the rows of ``listed``; ``positions`` are of all rows of the step."""

    listed: CandidateList
    positions: Int[Tensor, " step_rows"]

    @cached_property
    def table(self) -> ListedTable:
        return ListedTable((), self.listed.pages.device, self.listed)

    @cached_property
    def row_positions(self) -> Int[Tensor, " rows"]:
        # padding maps to row 0, and has no candidates
        return self.positions[self.listed.row.clamp_min(0)].long()

    def forced(self, sink: int, recent: int) -> Bool[Tensor, "rows most"]:
        column = torch.arange(self.listed.pages.shape[1], device=self.listed.pages.device)
        last, bound = self.listed.first_recent[:, None], self.listed.num_pages[:, None]
        return (column < sink) | ((column >= last) & (column < bound))


class Scored(NamedTuple):
    """How pages are scored: by summaries, after the first ``sink`` pages; or by ``worth``. Layers
    whose entry of ``sources`` is another layer read that layer's choice."""

    summaries: PageSummaries | None
    rotations: Sequence[Rotation]
    rules: Sequence[ScoreRule]
    pool: PagePool
    sink: int
    policy: PagePolicy
    worth: Worth | None
    sources: tuple[int, ...]

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
            candidates.sources,
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
