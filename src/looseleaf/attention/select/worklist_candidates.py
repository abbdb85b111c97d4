"""The candidates of a list at fixed addresses, as policies see those of a step: a policy that
scores pages by tensors does so in a captured step too, since all of them keep their shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looseleaf.attention.select.candidates import Candidates, CandidateTable, SelectingRow
from looseleaf.ops.select_pages import CandidateList


@runtime_checkable
class Worth(Protocol):
    """How much rows want each candidate, where more is needed than products with what is kept of
    pages. Equal ones give equal numbers, and graphs are made for each."""

    @property
    def says_how_many(self) -> bool:
        """Whether fewer may be wanted than a row's limit has room for, which only the device
        knows."""
        ...

    def looked(self, page_size: int, head_dim: int) -> int:
        """How many numbers of a page's keys it looks at, for a KV head."""
        ...

    def of(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Float[Tensor, "rows kv_heads most"]:
        """fp32: inf for what must be read, -inf for what must not and where there is nothing. Looks
        at no number of the device, and at nothing of rows but tensors."""
        ...


@dataclass(frozen=True, eq=False)
class ListedTable(CandidateTable):
    """The table of ``listed`` candidates; a row's spans have numbers of their own in all rows."""

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
    """What a list knows nothing of."""
    raise AssertionError("a list has one table, and knows no rows")


@dataclass(frozen=True, eq=False)
class ListedCandidates(Candidates):
    """What the rows of ``listed`` choose from; ``positions`` are those of all rows of the step."""

    listed: CandidateList
    positions: Int[Tensor, " step_rows"]

    @cached_property
    def table(self) -> ListedTable:
        return ListedTable((), self.listed.pages.device, self.listed)

    @cached_property
    def row_positions(self) -> Int[Tensor, " rows"]:
        # what pads a list is no row, and reads nothing
        return self.positions[self.listed.row.clamp_min(0)].long()

    def forced(self, sink: int, recent: int) -> Bool[Tensor, "rows most"]:
        column = torch.arange(self.listed.pages.shape[1], device=self.listed.pages.device)
        last, bound = self.listed.first_recent[:, None], self.listed.num_pages[:, None]
        return (column < sink) | ((column >= last) & (column < bound))
