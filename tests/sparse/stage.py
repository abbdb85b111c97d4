"""A decode step over random keys, read densely or by a policy: what the laws of selection are tried
on."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.paged import PagedAttention, StepRows
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.attention.select.policy import PagePolicy, RevisedRow, SelectingRow
from looseleaf.config import RopeConfig
from looseleaf.kv.pool import PagePool
from looseleaf.ops.dispatch import Implementation
from looseleaf.retro import Revising
from looseleaf.rope import build_rotation
from looseleaf.types import ScoreRule
from tests.attention.forests import PAGE_SIZE, StepRecipe, decode_rows, spans_of

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 4, 2, 32, 2
RULE = ScoreRule(HEAD_DIM**-0.5)


@dataclass(eq=False)
class Stage:
    """Rows with their pool. ``rules`` are those of the layers, which turn by different tables."""

    rows: Sequence[DecodeRow]
    rules: tuple[ScoreRule, ...] = (RULE,) * NUM_LAYERS
    dtype: torch.dtype = torch.float32
    implementation: Implementation = "auto"
    patched: bool = False
    seed: int = 0
    _pages: int = field(init=False)

    def __post_init__(self) -> None:
        self._pages = 2 + max(max(span.pages) for row in self.rows for span in spans_of(row))
        if self.patched:
            self.rows = [_with_patch(row, self._pages + n) for n, row in enumerate(self.rows)]
            self._pages += len(self.rows)
        self._generator = torch.Generator().manual_seed(self.seed)
        self.pool = PagePool(
            num_pages=self._pages, page_size=PAGE_SIZE, num_layers=len(self.rules),
            num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=self.dtype,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.pool.allocate(self._pages)
        self.pool.kv.copy_(self._normal(*self.pool.kv.shape))
        for row in self.rows:
            for span in row.settled:
                if span.places is not None:
                    self.pool.set_positions(span.pages, span.places)
        self.q = self._normal(len(self.rows), NUM_QO_HEADS, HEAD_DIM)
        self.kv = [self._normal(len(self.rows), NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]

    @classmethod
    def of(cls, recipe: StepRecipe, **options: object) -> "Stage":
        """The rows of a recipe."""
        return cls(decode_rows(recipe), **options)  # type: ignore[arg-type]

    @cached_property
    def attention(self) -> PagedAttention:
        ropes = (
            RopeConfig(HEAD_DIM, HEAD_DIM, theta=10.0**n) for n in range(4, 4 + len(self.rules))
        )
        return PagedAttention(
            self.pool,
            tuple(build_rotation(rope, 1024) for rope in ropes),
            self.rules,
            NUM_QO_HEADS,
            implementation=self.implementation,
        )

    def selecting(self, policy: PagePolicy | Sequence[PagePolicy | None]) -> list[DecodeRow]:
        """The rows under ``policy``, or each under its own; one without a candidate reads all."""
        each = policy if isinstance(policy, Sequence) else [policy] * len(self.rows)
        chosen: list[DecodeRow] = []
        for row, its in zip(self.rows, each, strict=True):
            sealed = (row.tail.length - 1) // PAGE_SIZE
            if its is not None:
                state = None
                if isinstance(its, Revising):
                    # the newest row of an output of its own
                    state = RevisedRow(its.kept.take(), row.position % its.kept.window, 0)
                selecting = SelectingRow(row.position, row.settled, row.tail, its, sealed, state)
                chosen.append(selecting if selecting.num_candidates else row)
            else:
                chosen.append(row)
        return chosen

    def answer(self, rows: Sequence[DecodeRow] | None = None) -> Tensor:
        """What the layers answer, ``[layers, rows, heads, head_dim]``; all rows if none are named.

        Rows that are left out ask nothing, and store nothing."""
        rows = self.rows if rows is None else rows
        which = [[r.tail.pages for r in self.rows].index(row.tail.pages) for row in rows]
        last = [row.tail.length - 1 for row in rows]
        slots = [
            row.tail.pages[n // PAGE_SIZE] * PAGE_SIZE + n % PAGE_SIZE
            for row, n in zip(rows, last, strict=True)
        ]
        step = StepRows(rows, [], torch.tensor(slots), torch.tensor(last))
        attend = self.attention.step(step)
        self.selected = attend.reads.selected
        k, v = (x[which] for x in self.kv)
        return torch.stack([attend(n, self.q[which], k, v) for n in range(len(self.rules))])

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._generator).to(self.dtype)


def _with_patch(row: DecodeRow, page: int) -> DecodeRow:
    """The row with some keys of its settled spans hidden, and others in their place."""
    settled, places = [], []
    for span in row.settled:
        hidden = np.zeros(-(-span.length // 32) or 1, dtype=np.uint32)
        for place in range(0, span.length, 7):
            hidden[place // 32] |= np.uint32(1) << np.uint32(place % 32)
            places.append(span.offset + place)
        settled.append(replace(span, hidden=hidden.view(np.int32)) if span.length else span)
    places = places[:PAGE_SIZE]
    if places:
        settled.append(ReadSpan([page], 0, len(places), 0, places=places))
    return DecodeRow(row.position, tuple(settled), row.tail)
