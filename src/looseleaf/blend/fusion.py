"""The pass in which the documents of a request meet: its text, and the tokens computed again.

Documents are encoded, shared and read as ever. What a request computes again of them goes to its
*patch*, pages of its own whose keys stand in frame 0, and is hidden from it in the shared pages,
which are never written. The rows of the pass are all text behind the first blended document and the
chosen tokens, in the order of their positions; each sees what stands at its own or before, so the
pass can be cut into chunks like any prompt."""

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
from looseleaf.prompt.placements import DocumentUse, TextRun

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FusedRows:
    """Rows by position: ``positions``, and a ``table`` ``[3, rows]`` of token, slot and place in
    the segment.
    """

    positions: IntArray
    table: IntArray


@dataclass(frozen=True)
class Begun:
    """How far the document rows of a pass have come while they were chosen: ``hidden`` are their
    states before ``layer``, rising by position. What they keep of the layers before is in the patch
    already."""

    layer: int
    hidden: Float[Tensor, "rows hidden_size"]


@dataclass(eq=False)
class Fusion:
    """What one sequence does about its blended documents.

    ``before`` are the parts in front of the first of them, ``parts`` it and all behind it; the last
    is the tail, whose first ``num_prompt_tail`` tokens are the prompt's. ``positions`` are those of
    the tokens to be computed again, ascending, None until they are chosen; a sequence that starts
    over keeps them, and one that needs no evidence chooses when it is first asked. ``most`` tokens
    may be chosen, or tried out. ``first_number`` is that of the first of ``parts`` among all parts.
    ``pages`` is the patch, of ``num_pages`` while the sequence is admitted; with ``patched`` its
    keys and values are there once the tokens are chosen, and the pass has text only; where they
    have only ``begun``, the pass goes on with them. ``stale`` tokens were chosen like that in pages
    that are gone. ``scores`` are the evidence's, kept for who wants to know."""

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
        at = self._candidate_positions
        of = torch.from_numpy(numbers + self.first_number)
        return Candidates(torch.from_numpy(at), of, (len(at),))

    @property
    def positions(self) -> IntArray | None:
        """Where the tokens stand that are computed again, None until there is evidence for them."""
        if self._positions is None and isinstance(self.selector, FirstK):
            counts = self.selector.counts([use.num_tokens for use in self.documents])
            stand = zip(self.documents, counts, strict=True)
            first = [np.arange(use.start, use.start + count) for use, count in stand]
            self._positions = np.concatenate(first)
        elif self._positions is None and self.selector.evidence == "none":
            kept = self.selector.select(self.candidates, torch.zeros(len(self.candidates)))
            self._positions = self.candidates.positions.numpy()[kept.numpy()]
        return self._positions

    def expected(self) -> tuple[int, float]:
        """How many tokens are computed again, at most, and where they stand on average: until they
        are chosen, where all do that may be."""
        if self._positions is not None:
            known = self._positions
            return len(known), float(known.mean()) if len(known) else 0.0
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
        """Whether the pass may begin: its tokens are chosen, and computed if that is one."""
        return self.positions is not None and not self.stale

    @property
    def chosen_positions(self) -> list[int]:
        """``positions`` as a list, empty until they are chosen."""
        return [] if self.positions is None else self.positions.tolist()

    @property
    def num_pages(self) -> int:
        """Pages of the patch: for all tokens that may be chosen, or try to be, until they are."""
        known = self._positions is not None and not self.stale
        most = len(self._positions) if known and self._positions is not None else self.most
        return -(-most // self.page_size)

    @property
    def num_tokens(self) -> int:
        """Rows of the pass."""
        return len(self.rows.positions)

    @property
    def num_evidence_rows(self) -> int:
        """About how many rows the passes have that tell which tokens to choose."""
        text = sum(run.num_tokens for run in self.runs[:-1]) + self.num_prompt_tail
        return text + (self.most if isinstance(self.selector, Deviation | Oracle) else 0)

    @property
    def rows(self) -> FusedRows:
        """The rows of the pass, once the tokens are chosen and there are pages."""
        if self._rows is None:
            assert self.positions is not None, "a pass begins when its tokens are chosen"
            rows = [self._text_rows(run, run.num_tokens) for run in self.runs]
            rows += [] if self.patched else [self.document_rows(self.positions)]
            self._rows = by_position(rows)
        return self._rows

    def text_rows(self) -> FusedRows:
        """The rows of the prompt's own text, which tell what it reads."""
        *others, tail = self.runs
        rows = [self._text_rows(run, run.num_tokens) for run in others]
        return by_position([*rows, self._text_rows(tail, self.num_prompt_tail)])

    def document_rows(self, positions: IntArray) -> FusedRows:
        """Rows of document tokens at ``positions``, whose keys go to the patch in this order."""
        table, cuts = np.empty((3, len(positions)), dtype=np.int64), self._cuts(positions)
        for use, start, stop in zip(self.documents, cuts[::2], cuts[1::2], strict=True):
            table[0, start:stop] = use.part.ids[positions[start:stop] - use.start]
        table[1], table[2] = self.patch_slots(np.arange(len(positions))), positions
        return FusedRows(positions, table)

    def patch_slots(self, nth: IntArray) -> IntArray:
        """The slots of the keys number ``nth`` of the patch."""
        pages = np.asarray(self.pages, dtype=np.int64)
        return pages[nth // self.page_size] * self.page_size + nth % self.page_size

    def prefill(self, start: int, stop: int) -> PrefillChunk:
        """Rows ``start:stop`` of the pass as the attention plan knows them."""
        assert self.positions is not None
        positions = self.rows.positions[start:stop]
        return PrefillChunk(positions, self.spans(self.positions, int(positions[-1])))

    def pass_rows(self, chosen: IntArray) -> FusedRows:
        """Rows of document tokens at ``chosen``, and of the text before the last candidate."""
        last = int(self._candidate_positions[-1])
        texts = [self._text_rows(run, run.num_tokens) for run in self.runs if run.start < last]
        return by_position([*texts, self.document_rows(chosen)])

    def documents_among(self, start: int, stop: int) -> slice:
        """Which of the chosen tokens are among rows ``start:stop`` of the pass."""
        assert self.positions is not None
        rows = self.rows.positions
        bounds = rows[start], rows[stop - 1] + 1
        return slice(*np.searchsorted(self.positions, bounds).tolist())

    def stored_slots(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Slots (``page * page_size + slot``) of stored document tokens, and their places in their
        segments.
        """
        starts = np.array([use.start for use in self.documents])
        which = np.searchsorted(starts, positions, "right") - 1
        places = positions - starts[which]
        each = [np.asarray(use.write_pages, dtype=np.int64) for use in self.documents]
        first = np.cumsum([0, *map(len, each)])[which]
        pages = np.concatenate(each)[first + places // self.page_size]
        return pages * self.page_size + places % self.page_size, places

    def settle(self, positions: IntArray) -> list[int]:
        """Choose the tokens at ``positions``; returns the pages that the patch has too many."""
        self._positions, self.stale = positions, False
        spare = self.pages[self.num_pages :]
        del self.pages[self.num_pages :]
        return spare

    def spans(self, replaced: IntArray, last: int) -> tuple[ReadSpan, ...]:
        """What rows up to position ``last`` read when the document tokens at ``replaced`` are in
        the patch.
        """
        spans = [*self._before(), *self._behind(replaced, self.parts)]
        return tuple(span for span in spans if span.offset <= last)

    def settled(self) -> tuple[ReadSpan, ...]:
        """What decoding reads besides the tail."""
        assert self.positions is not None
        return (*self._before(), *self._behind(self.positions, self.parts[:-1]))

    def stored(self) -> tuple[ReadSpan, ...]:
        """The blended documents as they are stored."""
        return tuple(use.span() for use in self.documents)

    def num_chosen(self) -> list[int]:
        """How many tokens of each document are computed again, 0 until they are chosen."""
        if self.positions is None:
            return [0] * len(self.documents)
        cuts = self._cuts(self.positions)
        return [stop - start for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]

    def book(self) -> None:
        """The first ``computed`` rows are done: so much of every run is there."""
        done = self.rows.positions[: self.computed]
        for run in self.runs:
            stands = np.searchsorted(done, (run.start, run.start + run.num_tokens))
            run.computed = run.scheduled = int(stands[1] - stands[0])
        if self.begun is not None and self.computed == self.num_tokens:
            self.patched, self.begun = True, None

    def reset(self) -> None:
        """Forget pages and progress, but not what was chosen: it depends on the prompt alone.

        Where choosing and computing are one pass, both are done again."""
        self.pages = []
        self.scheduled = self.computed = 0
        self._rows = None
        self.stale = self.patched or self.begun is not None
        self.patched, self.begun = False, None

    @cached_property
    def _candidate_positions(self) -> IntArray:
        stand = [np.arange(use.start, use.start + use.num_tokens) for use in self.documents]
        return np.concatenate(stand)

    def _cuts(self, positions: IntArray) -> list[int]:
        """Where each blended document begins and ends among ``positions``."""
        ranges = [(use.start, use.start + use.num_tokens) for use in self.documents]
        cuts: list[int] = positions.searchsorted(np.array(ranges).ravel()).tolist()
        return cuts

    def _text_rows(self, run: TextRun, stop: int) -> FusedRows:
        table, places = np.empty((3, stop), dtype=np.int64), np.arange(stop)
        nth = places // self.page_size
        pages = np.array(run.pages, dtype=np.int64)[nth]
        table[0], table[2] = run.tokens[:stop], places
        table[1] = (pages - nth) * self.page_size + places
        return FusedRows(run.start + places, table)

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
            places = replaced[next(cuts) : next(cuts)] - part.start
            # of a document that is replaced as a whole nothing is read
            if len(places) < part.num_tokens:
                yield _without(part, places)
        if len(replaced):
            yield ReadSpan(self.pages, 0, len(replaced), 0, places=replaced)


def make_fusion(
    fuse: Fuse | None, parts: Sequence[TextRun | DocumentUse], page_size: int
) -> Fusion | None:
    """The fusion of a sequence with these parts, None if it computes no token again.

    A document directly behind what it was encoded behind is exact. All text behind the first other
    one becomes part of the pass."""
    blended = [
        n for n, part in enumerate(parts) if isinstance(part, DocumentUse) and not is_exact(part)
    ]
    if fuse is None or fuse.selector in ("none", "ape") or not blended:
        return None
    before, behind = list(parts[: blended[0]]), list(parts[blended[0] :])
    selector = make_selector(fuse)
    lengths = [part.num_tokens for part in behind if isinstance(part, DocumentUse)]
    most = sum(lengths)
    if isinstance(selector, Everything | FirstK | RandomTokens):
        most = selector.count(lengths)
    elif isinstance(selector, Links | Question):
        most = selector.budget.count(most)
    if not most:
        return None
    tail = behind[-1]
    for run in behind:
        if isinstance(run, TextRun):
            run.fused = True
    return Fusion(fuse, selector, before, behind, page_size, tail.num_tokens, most, blended[0])


def is_exact(use: DocumentUse) -> bool:
    """Whether a document stands directly behind what it was encoded behind."""
    return use.start == use.part.context_length


def make_selector(fuse: Fuse) -> Selector:
    """The selector that a policy names."""
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
    """From half as much again, evenly, to the budget itself."""
    steps = max(1, num_check_layers - 1)
    return (*(1.5 - 0.5 * n / steps for n in range(num_check_layers - 1)), 1.0)


def by_position(parts: Sequence[FusedRows]) -> FusedRows:
    positions = np.concatenate([rows.positions for rows in parts])
    order = np.argsort(positions, kind="stable")
    table = np.concatenate([rows.table for rows in parts], axis=1)
    return FusedRows(positions[order], table[:, order])


def _without(use: DocumentUse, places: IntArray) -> ReadSpan:
    """A document without the tokens at ``places``."""
    span = use.span()
    if not len(places):
        return span
    return ReadSpan(
        span.pages, span.offset, span.length, span.sharable, _bitmap(places, span.length)
    )


def _bitmap(places: IntArray, length: int) -> Bitmap:
    hidden = np.zeros(-(-length // 32) * 32, dtype=np.bool_)
    hidden[places] = True
    return np.packbits(hidden, bitorder="little").view("<i4")
