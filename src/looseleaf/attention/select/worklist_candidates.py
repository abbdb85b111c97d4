"""Candidates in a device list at fixed addresses, with the interface of `Candidates`.

Policies that score pages by tensors thus run in a captured step too: all shapes are fixed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from looseleaf.attention.select.candidates import CandidateTable
from looseleaf.attention.select.policy import Candidates, SelectingRow
from looseleaf.ops.select_pages import CandidateList


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
