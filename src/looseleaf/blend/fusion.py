"""Fusion: the answering pass of a request over its text and the chosen tokens of its documents.

Keys and values of chosen tokens go to the *patch*, pages of the request in frame 0. Shared pages
are never written; a bitmap hides the replaced tokens. The rows of the pass are all text after the
first blended document and the chosen tokens, by position. Each row reads positions up to its own,
so the pass can be cut into chunks like any prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import Bitmap, ReadSpan
from looseleaf.blend import (
    Budget,
    Candidates,
    Deviation,
    Everything,
    FirstK,
    Links,
    Oracle,
    Question,
    RandomTokens,
    Selector,
)
from looseleaf.config import Fuse
from looseleaf.graphs.layerwise import LateRows
from looseleaf.prompt.placements import DocumentUse, TextRun

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FusedRows:
    """Rows by position, with a ``table`` ``[3, rows]`` of token, slot and offset in the segment."""

    positions: IntArray
    table: IntArray


@dataclass(frozen=True)
class Begun:
    """Document rows that token scoring computed up to ``layer``: their ``hidden`` states before it,
    by position. Their keys and values of earlier layers are in the patch."""

    layer: int
    hidden: Float[Tensor, "rows hidden_size"]


@dataclass(eq=False)
class Fusion:
    """The blending state of one sequence.

    ``before`` are the parts before the first blended document, ``parts`` that document and all
    later parts. The last part is the tail, whose first ``num_prompt_tail`` tokens belong to the
    prompt. ``most`` is the largest number of chosen tokens or scouts. ``first_number`` is the index
    of the first of ``parts`` among all parts. ``pages`` is the patch, of ``num_pages``.

    ``positions`` are the ascending positions of chosen tokens, None before the choice; a preempted
    sequence keeps them. With ``patched`` token scoring has filled the patch, so the pass has text
    only. With ``begun`` the pass continues rows that token scoring began. ``stale`` means that the
    pages of such rows were freed. ``scores`` are the scores of the choice, for reports."""

    fuse: Fuse
    selector: Selector
    before: list[TextRun | DocumentUse]
    parts: list[TextRun | DocumentUse]
    page_size: int
    num_prompt_tail: int
    most: int
    first_number: int
    pages: list[int] = field(default_factory=list)
    scores: torch.Tensor | None = None
    patched: bool = False
    begun: Begun | None = None
    stale: bool = False
    scheduled: int = 0
    computed: int = 0
    _positions: IntArray | None = None
    _rows: FusedRows | None = None

    @cached_property
    def candidates(self) -> Candidates:
        """The tokens of the blended documents."""
        uses = [(n, part) for n, part in enumerate(self.parts) if isinstance(part, DocumentUse)]
        numbers = np.repeat([n for n, _ in uses], [use.num_tokens for _, use in uses])
        positions = torch.from_numpy(self._candidate_positions)
        documents = torch.from_numpy(numbers + self.first_number)
        return Candidates(positions, documents, (len(positions),))

    @property
    def positions(self) -> IntArray | None:
        """Positions of the chosen tokens; None before token scoring."""
        if self._positions is None and self.selector.evidence == "none":
            self._positions = self._position_choice()
        return self._positions

    def _position_choice(self) -> IntArray:
        """The choice of a selector without scores."""
        counts = self.selector.leading([use.num_tokens for use in self.documents])
        if counts is None:
            kept = self.selector.select(self.candidates, torch.zeros(len(self.candidates)))
            positions: IntArray = self.candidates.positions.numpy()[kept.numpy()]
            return positions
        pairs = zip(self.documents, counts, strict=True)
        return np.concatenate([np.arange(use.start, use.start + count) for use, count in pairs])

    def expected(self) -> tuple[int, float]:
        """The number of chosen tokens and their mean position.

        Before the choice these are the largest number and the mean position of all candidates."""
        if self._positions is not None:
            count = len(self._positions)
            return count, float(self._positions.mean()) if count else 0.0
        middles = [(use.num_tokens, use.start + (use.num_tokens - 1) / 2) for use in self.documents]
        total = sum(length for length, _ in middles)
        return self.most, sum(length * middle for length, middle in middles) / total

    @cached_property
    def documents(self) -> list[DocumentUse]:
        """The blended documents."""
        return [part for part in self.parts if isinstance(part, DocumentUse)]

    @cached_property
    def runs(self) -> list[TextRun]:
        """The text of the pass."""
        return [part for part in self.parts if isinstance(part, TextRun)]

    @property
    def chosen(self) -> bool:
        """Whether the pass may begin: its tokens are chosen and not stale."""
        return self.positions is not None and not self.stale

    @property
    def chosen_positions(self) -> list[int]:
        """``positions`` as a list, empty before the choice."""
        return [] if self.positions is None else self.positions.tolist()

    @property
    def num_pages(self) -> int:
        """Pages of the patch; before the choice, pages for the largest number of tokens."""
        known = self._positions is not None and not self.stale
        most = len(self._positions) if known and self._positions is not None else self.most
        return -(-most // self.page_size)

    @property
    def num_tokens(self) -> int:
        """Rows of the pass."""
        return len(self.rows.positions)

    @property
    def num_evidence_rows(self) -> int:
        """The approximate number of rows of token scoring."""
        text = sum(run.num_tokens for run in self.runs[:-1]) + self.num_prompt_tail
        return text + (self.most if self.selector.computes_candidates else 0)

    @property
    def rows(self) -> FusedRows:
        """The rows of the pass, after the choice and the admission."""
        if self._rows is None:
            assert self.positions is not None, "a pass begins when its tokens are chosen"
            rows = [self._text_rows(run, run.num_tokens) for run in self.runs]
            rows += [] if self.patched else [self.document_rows(self.positions)]
            self._rows = by_position(rows)
        return self._rows

    def text_rows(self) -> FusedRows:
        """The rows of the prompt's text, for token scoring."""
        *runs, tail = self.runs
        rows = [self._text_rows(run, run.num_tokens) for run in runs]
        return by_position([*rows, self._text_rows(tail, self.num_prompt_tail)])

    def document_rows(self, positions: IntArray) -> FusedRows:
        """Rows of document tokens at ``positions``; their keys go to the patch in this order."""
        table, cuts = np.empty((3, len(positions)), dtype=np.int64), self._cuts(positions)
        for use, start, stop in zip(self.documents, cuts[::2], cuts[1::2], strict=True):
            table[0, start:stop] = use.part.ids[positions[start:stop] - use.start]
        table[1], table[2] = self.patch_slots(np.arange(len(positions))), positions
        return FusedRows(positions, table)

    def patch_slots(self, nth: IntArray) -> IntArray:
        """The slots of the patch's keys with indices ``nth``."""
        pages = np.asarray(self.pages, dtype=np.int64)
        return pages[nth // self.page_size] * self.page_size + nth % self.page_size

    def prefill(self, start: int, stop: int) -> PrefillChunk:
        """Rows ``start:stop`` of the pass, for the attention plan."""
        assert self.positions is not None
        positions = self.rows.positions[start:stop]
        return PrefillChunk(positions, self.spans(self.positions, int(positions[-1])))

    def pass_rows(self, chosen: IntArray) -> FusedRows:
        """Rows of document tokens at ``chosen``, and of the text before the last candidate."""
        last = int(self._candidate_positions[-1])
        texts = [self._text_rows(run, run.num_tokens) for run in self.runs if run.start < last]
        return by_position([*texts, self.document_rows(chosen)])

    def late_rows(self, start: int, stop: int, first_row: int) -> LateRows | None:
        """The late rows among rows ``start:stop`` of the pass, which are rows of a step from
        ``first_row`` on; None if there are none."""
        if self.begun is None or self.positions is None:
            return None
        rows = self.rows.positions
        first, last = np.searchsorted(self.positions, (rows[start], rows[stop - 1] + 1)).tolist()
        if first == last:
            return None
        late = np.searchsorted(rows, self.positions[first:last]) - start
        return LateRows(self.begun.layer, first_row + late, self.begun.hidden[first:last])

    def stored_slots(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Slots (``page * page_size + offset``) of stored document tokens, and their offsets in
        their segments."""
        starts = np.array([use.start for use in self.documents])
        which = np.searchsorted(starts, positions, "right") - 1
        offsets = positions - starts[which]
        pages_of = [np.asarray(use.write_pages, dtype=np.int64) for use in self.documents]
        first = np.cumsum([0, *map(len, pages_of)])[which]
        pages = np.concatenate(pages_of)[first + offsets // self.page_size]
        return pages * self.page_size + offsets % self.page_size, offsets

    def settle(self, positions: IntArray) -> list[int]:
        """Choose the tokens at ``positions``; returns the patch's surplus pages."""
        self._positions, self.stale = positions, False
        spare = self.pages[self.num_pages :]
        del self.pages[self.num_pages :]
        return spare

    def spans(self, replaced: IntArray, last: int) -> tuple[ReadSpan, ...]:
        """The spans of rows up to position ``last``, with tokens at ``replaced`` in the patch."""
        spans = [*self._before(), *self._behind(replaced, self.parts)]
        return tuple(span for span in spans if span.offset <= last)

    def settled(self) -> tuple[ReadSpan, ...]:
        """The spans of decode rows without the tail."""
        assert self.positions is not None
        return (*self._before(), *self._behind(self.positions, self.parts[:-1]))

    def stored(self) -> tuple[ReadSpan, ...]:
        """The spans of the blended documents, without the patch."""
        return tuple(use.span() for use in self.documents)

    def num_chosen(self) -> list[int]:
        """The number of chosen tokens of each document; 0 before the choice."""
        if self.positions is None:
            return [0] * len(self.documents)
        cuts = self._cuts(self.positions)
        return [stop - start for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]

    def book(self) -> None:
        """Update the computed tokens of every run after the first ``computed`` rows."""
        positions = self.rows.positions[: self.computed]
        for run in self.runs:
            first, last = np.searchsorted(positions, (run.start, run.start + run.num_tokens))
            run.computed = run.scheduled = int(last - first)
        if self.begun is not None and self.computed == self.num_tokens:
            self.patched, self.begun = True, None

    def reset(self) -> None:
        """Drop pages and progress, but keep the choice, which depends only on the prompt.

        If the choice has filled or begun the patch, token scoring runs again."""
        self.pages = []
        self.scheduled = self.computed = 0
        self._rows = None
        self.stale = self.patched or self.begun is not None
        self.patched, self.begun = False, None

    @cached_property
    def _candidate_positions(self) -> IntArray:
        ranges = [np.arange(use.start, use.start + use.num_tokens) for use in self.documents]
        return np.concatenate(ranges)

    def _cuts(self, positions: IntArray) -> list[int]:
        """The begin and end of each blended document as indices into ``positions``."""
        ranges = [(use.start, use.start + use.num_tokens) for use in self.documents]
        cuts: list[int] = positions.searchsorted(np.array(ranges).ravel()).tolist()
        return cuts

    def _text_rows(self, run: TextRun, stop: int) -> FusedRows:
        table, offsets = np.empty((3, stop), dtype=np.int64), np.arange(stop)
        nth = offsets // self.page_size
        pages = np.array(run.pages, dtype=np.int64)[nth]
        table[0], table[2] = run.tokens[:stop], offsets
        table[1] = (pages - nth) * self.page_size + offsets
        return FusedRows(run.start + offsets, table)

    def _before(self) -> Iterator[ReadSpan]:
        for part in self.before:
            yield part.span() if isinstance(part, DocumentUse) else part.span(part.num_tokens)

    def _behind(
        self, replaced: IntArray, parts: Sequence[TextRun | DocumentUse]
    ) -> Iterator[ReadSpan]:
        cuts = iter(self._cuts(replaced))
        for part in parts:
            if isinstance(part, TextRun):
                yield part.span(part.num_tokens)
                continue
            offsets = replaced[next(cuts) : next(cuts)] - part.start
            # a document without remaining tokens has no span
            if len(offsets) < part.num_tokens:
                yield _without(part, offsets)
        if len(replaced):
            yield ReadSpan(self.pages, 0, len(replaced), 0, places=replaced)


def make_fusion(
    fuse: Fuse | None,
    parts: Sequence[TextRun | DocumentUse],
    page_size: int,
    num_given: int = 0,
) -> Fusion | None:
    """The fusion of a sequence with these parts; None if it computes no token again.

    The last ``num_given`` tokens are a given answer, which token scoring does not read.

    A document directly after its encoding context is exact. All text after the first document that
    is not exact belongs to the pass."""
    blended = [
        n for n, part in enumerate(parts) if isinstance(part, DocumentUse) and not is_exact(part)
    ]
    if fuse is None or fuse.selector in ("none", "ape") or not blended:
        return None
    before, behind = list(parts[: blended[0]]), list(parts[blended[0] :])
    selector = make_selector(fuse)
    most = selector.count([part.num_tokens for part in behind if isinstance(part, DocumentUse)])
    if not most:
        return None
    tail = behind[-1]
    for run in behind:
        if isinstance(run, TextRun):
            run.fused = True
    question = tail.num_tokens - num_given
    return Fusion(fuse, selector, before, behind, page_size, question, most, blended[0])


def is_exact(use: DocumentUse) -> bool:
    """Whether a document is directly after everything that it was computed with."""
    return use.primer is None and use.start == use.part.context_length


def make_selector(fuse: Fuse) -> Selector:
    """The selector of a policy."""
    if fuse.selector == "all":
        return Everything()
    if fuse.selector == "first":
        return FirstK(fuse.tokens or 0, share=fuse.ratio)
    budget = Budget(fuse.ratio, fuse.tokens, fuse.threshold)
    if fuse.selector == "random":
        return RandomTokens(budget)
    if fuse.selector == "deviation":
        return Deviation(
            budget, fuse.check_layers, fuse.check_factors or _falling(len(fuse.check_layers))
        )
    if fuse.selector == "question":
        return Question(budget, fuse.watched_share)
    if fuse.selector == "oracle":
        return Oracle(budget)
    return Links(budget, watched_share=fuse.watched_share)


def _falling(num_check_layers: int) -> tuple[float, ...]:
    """Factors that fall evenly from 1.5 to 1."""
    steps = max(1, num_check_layers - 1)
    return (*(1.5 - 0.5 * n / steps for n in range(num_check_layers - 1)), 1.0)


def by_position(parts: Sequence[FusedRows]) -> FusedRows:
    positions = np.concatenate([rows.positions for rows in parts])
    order = np.argsort(positions, kind="stable")
    table = np.concatenate([rows.table for rows in parts], axis=1)
    return FusedRows(positions[order], table[:, order])


def _without(use: DocumentUse, offsets: IntArray) -> ReadSpan:
    """The span of a document without the tokens at ``offsets``."""
    span = use.span()
    if not len(offsets):
        return span
    return ReadSpan(
        span.pages, span.offset, span.length, span.sharable, _bitmap(offsets, span.length)
    )


def _bitmap(offsets: IntArray, length: int) -> Bitmap:
    hidden = np.zeros(-(-length // 32) * 32, dtype=np.bool_)
    hidden[offsets] = True
    return np.packbits(hidden, bitorder="little").view("<i4")
