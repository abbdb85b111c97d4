"""The scheduler: continuous batching with chunked prefill, first come, first served.

A sequence is admitted after all pages of its prompt are reserved. If a growing output gets no page,
the youngest sequence is preempted and starts over later. The oldest can always finish, so no
sequence waits forever."""

import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.blend.fusion import Fusion
from looseleaf.engine.admission import Admission
from looseleaf.engine.reports.outputs import ReuseReport
from looseleaf.engine.sequence import Phase, Sequence
from looseleaf.engine.step_budget import StepBudget
from looseleaf.engine.tiering.tiering import Tiering
from looseleaf.errors import IntegrityError
from looseleaf.kv.store import PendingLoad, Segment
from looseleaf.prompt.placements import DocumentUse, TextRun

IntArray = npt.NDArray[np.int64]
# longest wait of an idle step before the scheduler checks for new requests, in seconds
_LONGEST_WAIT = 0.05
# prefilling sequences that are admitted beyond the token budget, so that later ones share documents
_AT_HAND = 8
# a step may exceed its budget by 1 / _SLACK to end a prompt or a document
_SLACK = 64


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start:stop`` of a run, a document or a fusion that a step computes."""

    sequence: Sequence
    target: TextRun | DocumentUse | Fusion
    start: int
    stop: int

    @property
    def fusion(self) -> Fusion | None:
        """The blending pass that its rows belong to, if any."""
        return self.target if isinstance(self.target, Fusion) else None

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def ends_prompt(self) -> bool:
        """Whether the chunk's last row yields the next token's logits."""
        last = self.target is self.sequence.tail or self.target is self.sequence.fusion
        return last and self.stop == self.target.num_tokens

    def awaits(self) -> list[PendingLoad]:
        """The loads in progress of documents that its rows read."""
        if isinstance(self.target, DocumentUse) or not self.sequence.documents:
            return []
        stop = self.target if isinstance(self.target, TextRun) else None
        return self.sequence.arriving(stop)

    def table(self, page_size: int) -> IntArray:
        """Token, slot and offset in its segment of every row, int64 ``[3, rows]``."""
        target = self.target
        if isinstance(target, Fusion):
            return target.rows.table[:, self.start : self.stop]
        offsets = np.arange(self.start, self.stop)
        pages = np.asarray(target.write_pages)[offsets // page_size]
        tokens = np.asarray(target.tokens[self.start : self.stop])
        return np.stack([tokens, pages * page_size + offsets % page_size, offsets])

    def prefill(self) -> PrefillChunk:
        """The chunk's rows for the attention plan."""
        target = self.target
        if isinstance(target, Fusion):
            return target.prefill(self.start, self.stop)
        positions = range(target.position(self.start), target.position(self.stop))
        if isinstance(target, TextRun):
            spans = self.sequence.spans_before(target)
            hosted = self.sequence.hosted_before(target)
            return PrefillChunk(positions, (*spans, target.span(self.stop)), hosted)
        own = ReadSpan(target.write_pages, target.encoded_at, self.stop, 0)
        primed = () if target.primer is None else (target.primer.span(),)
        lead = self.sequence.lead
        if lead is None or target.part.context_length == 0:
            return PrefillChunk(positions, (*primed, own))
        return PrefillChunk(positions, (lead.span(target.part.context_length), *primed, own))


@dataclass(frozen=True)
class StepWork:
    """A step: token scoring of ``choosing``, a row for each of ``decode``, and rows of ``chunks``.

    ``admitted`` are newly admitted sequences with their reuse. ``refused`` are sequences that do
    not fit the pool even when no other sequence runs."""

    decode: list[Sequence]
    chunks: list[Chunk]
    admitted: list[tuple[Sequence, ReuseReport]]
    preempted: list[Sequence]
    refused: list[Sequence]
    choosing: list[Sequence] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not self.decode and not self.chunks and not self.choosing

    def without_ended(self) -> "StepWork":
        """The step without the sequences that have ended since."""
        decode = [s for s in self.decode if s.phase is not Phase.FINISHED]
        if not self.chunks and len(decode) == len(self.decode):
            return self
        chunks = [c for c in self.chunks if c.sequence.phase is not Phase.FINISHED]
        return replace(self, decode=decode, chunks=chunks)


@dataclass
class Scheduler:
    """Waiting and running sequences. ``schedule`` makes a step of about ``token_budget`` tokens,
    ``complete`` records its results. At most ``max_num_seqs`` run. A ``goal`` also bounds the
    prefill beside running outputs."""

    max_num_seqs: int
    admission: Admission
    token_budget: int
    tiering: Tiering
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    goal: StepBudget | None = None
    # the sequence that last found too few pages, and the store's turnover at that time
    _blocked: tuple[Sequence, int] | None = None
    # whether a waiting sequence needs a document that another engine computes
    _waits_elsewhere: bool = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence and release its pages."""
        if sequence in self.running:
            # completed loads stay in the pool even if no further step runs
            self._settle()
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.phase = Phase.FINISHED

    def schedule(self) -> StepWork:
        """The next step: all decode rows, new admissions, and prefill within the budget."""
        self._settle()
        self._waits_elsewhere = False
        preempted = self._make_room()
        decode = [s for s in self.running if s.phase is Phase.DECODE]
        budget = self._budget(decode)
        # a sequence that just made room must not take it back in the same step
        admitted = self._admit_waiting(budget) if self.waiting and not preempted else []
        choosing, chunks = list[Sequence](), list[Chunk]()
        if len(decode) < len(self.running):
            choosing, budget = self._choosing(budget)
            chunks = self._fill_chunks(budget)
        idle = not decode and not chunks and not choosing
        layerwise = self.tiering.layerwise
        if idle and self.tiering.arriving and not any(s.warms and s.warm for s in self.running):
            # an idle step may wait for loads layer by layer
            choosing, budget = self._choosing(budget, layerwise=layerwise)
            chunks = self._fill_chunks(budget, layerwise=layerwise)
            if not chunks and not choosing:
                self.tiering.wait(_LONGEST_WAIT)
            idle = False
        if idle and self._waits_elsewhere and not admitted:
            self.tiering.wait_for_others(_LONGEST_WAIT)
        hopeless = not (self.running or preempted or self._waits_elsewhere)
        hopeless = hopeless and not self.tiering.release_pages()
        refused = self._refuse_hopeless() if hopeless else []
        if self.running and idle and not any(s.warms and s.warm for s in self.running):
            raise IntegrityError("sequences run, but none has anything to compute")
        return StepWork(decode, chunks, admitted, preempted, refused, choosing)

    def schedule_ahead(self, ending: Collection[Sequence]) -> StepWork | None:
        """The step after one in flight, without the ``ending`` sequences.

        Returns None without work, or if growth needs a preemption, which requires all tokens. A
        step with admissions is returned even without other work, so that they are counted."""
        self._settle()
        decode = [s for s in self.running if s.phase is Phase.DECODE and s not in ending]
        if not all(s.has_room or self.admission.grow(s) for s in decode):
            return None
        budget = self._budget(decode)
        admitted = self._admit_waiting(budget) if self.waiting else []
        choosing, chunks = list[Sequence](), list[Chunk]()
        if any(s.phase is Phase.PREFILL for s in self.running):
            choosing, budget = self._choosing(budget)
            chunks = self._fill_chunks(budget)
        work = StepWork(decode, chunks, admitted, [], [], choosing)
        return None if work.empty and not admitted else work

    def complete(self, work: StepWork) -> list[Sequence]:
        """Record the results of a step; returns the sequences whose prompt is now complete."""
        for chunk in work.chunks:
            chunk.target.computed = chunk.stop
            if isinstance(chunk.target, Fusion):
                chunk.target.book()
            elif isinstance(chunk.target, TextRun):
                self.admission.publish(chunk.sequence, chunk.target)
            else:
                self._book_document(chunk.sequence, chunk.target)
        for sequence in work.decode:
            tail = sequence.tail
            tail.computed = tail.scheduled = len(tail.tokens)
            if tail.computed % sequence.page_size == 0:
                self.admission.publish(sequence, tail)
        sequences, complete = work.decode, list[Sequence]()
        if work.chunks:
            complete = [chunk.sequence for chunk in work.chunks if chunk.ends_prompt]
            for sequence in complete:
                sequence.phase = Phase.DECODE
                if sequence.prompt_logprobs is not None:
                    sequence.prompt_logprobs.finish()
            sequences = list(dict.fromkeys([*sequences, *(c.sequence for c in work.chunks)]))
        for sequence in sequences:
            for feature in sequence.features:
                feature.computed(sequence, ends_prompt=sequence in complete)
        for sequence in [*work.decode, *complete]:
            if sequence.replay:
                sequence.advance()
        return complete

    def take_back(self, work: StepWork) -> None:
        """Schedule the chunks of a failed step again."""
        for chunk in work.chunks:
            chunk.target.scheduled = min(chunk.target.scheduled, chunk.start)

    def _settle(self) -> None:
        """Record ended loads. A waiting sequence computes each document whose load failed."""
        if not self.tiering.arriving and not self.tiering.leaving:
            return
        for segment, arrived in self.tiering.settle():
            if arrived:
                segment.ready = True
                self._book_ready(segment)
                continue
            for reader in [u for s in self.running for u in s.documents if u.segment is segment]:
                reader.fell_back = reader.tier is not None
            self._reassign(segment)

    def _book_document(self, sequence: Sequence, use: DocumentUse) -> None:
        segment = use.segment
        assert segment is not None
        segment.filled = use.computed
        if use.computed < use.num_tokens:
            return
        segment.ready = True
        sequence.owned.remove(use)
        self._book_ready(segment)
        self.tiering.keep(segment, sequence.tenant)

    def _book_ready(self, segment: Segment) -> None:
        now = time.perf_counter()
        for reader in [u for s in self.running for u in s.documents if u.segment is segment]:
            if reader.seconds is None:
                reader.seconds = now - reader.begun

    def _make_room(self) -> list[Sequence]:
        """Reserve a page for each decode row that needs one; preempts the youngest sequences."""
        preempted = []
        for sequence in [s for s in self.running if s.phase is Phase.DECODE]:
            if sequence.has_room:
                continue
            while sequence in self.running and not self.admission.grow(sequence):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        for orphan in self.admission.release(sequence):
            self._reassign(orphan)

    def _reassign(self, orphan: Segment) -> None:
        if not any(self.admission.adopt(heir, orphan) for heir in self.running):
            raise IntegrityError("an unfinished document has no running sequence: please report it")

    def _admit_waiting(self, budget: int) -> list[tuple[Sequence, ReuseReport]]:
        """Admit waiting sequences in order until a step of ``budget`` tokens is full.

        Later admissions find more in the cache, and run while the device computes."""
        admitted: list[tuple[Sequence, ReuseReport]] = []
        skipped: list[Sequence] = []
        prefilling = [s for s in self.running if s.phase is Phase.PREFILL]
        budget -= sum(map(_num_pending, prefilling))
        few = _AT_HAND - len(prefilling)
        fresh, most = 0, self.max_num_seqs
        # a long queue of requests with one prefix must not be scanned at every step
        while self.waiting and len(self.running) < most > len(skipped) and fresh < _AT_HAND:
            if budget <= 0 and len(admitted) >= few:
                break
            sequence = self.waiting.popleft()
            try:
                known, blocked = self.admission.still_awaits(sequence), self._is_blocked(sequence)
                waits = self.tiering.claims is not None and not blocked
                elsewhere = waits and self.tiering.awaits_others(sequence)
                self._waits_elsewhere = self._waits_elsewhere or elsewhere
                awaits = known or elsewhere
                awaits = awaits or (not blocked and self.admission.awaits_prefix(sequence))
                report = None if awaits or blocked else self.admission.admit(sequence)
            except BaseException:
                # back to the queue without pages, where `remove` finds it
                self._requeue([*skipped, sequence])
                self._release(sequence)
                raise
            if awaits:
                # claims of other engines are known, too
                fresh += not (known or elsewhere)
                skipped.append(sequence)
                continue
            if report is None:
                self._blocked = sequence, self.admission.store.turnover
                skipped.append(sequence)
                break
            self.running.append(sequence)
            admitted.append((sequence, report))
            budget -= _num_pending(sequence)
        self._requeue(skipped)
        return admitted

    def _is_blocked(self, sequence: Sequence) -> bool:
        """Whether the sequence found too few pages and no page was freed since.

        This saves another look-up of its prompt. It is False when no sequence runs."""
        attempt = sequence, self.admission.store.turnover
        return bool(self.running) and self._blocked == attempt

    def _refuse_hopeless(self) -> list[Sequence]:
        """Refuse the first waiting sequence, which does not fit although no sequence runs."""
        if not self.waiting:
            return []
        hopeless = self.waiting.popleft()
        hopeless.phase = Phase.FINISHED
        return [hopeless]

    def _requeue(self, skipped: Iterable[Sequence]) -> None:
        self.waiting.extendleft(reversed(list(skipped)))

    def _budget(self, decode: list[Sequence]) -> int:
        """The most prefill rows of a step with these decode rows."""
        budget = self.token_budget - len(decode)
        if self.goal is None or not decode:
            return budget
        prefilling = (s for s in self.running if s.phase is Phase.PREFILL)
        first = next(prefilling, self.waiting[0] if self.waiting else None)
        if first is None:
            return budget
        return min(budget, self.goal.rows(decode, first.num_prompt_tokens))

    def _choosing(self, budget: int, *, layerwise: bool = False) -> tuple[list[Sequence], int]:
        """Sequences with token scoring in this step, and the rest of the budget.

        Scoring passes are not cut, so the rest may be negative."""
        choosing = []
        for sequence in self.running:
            fusion = sequence.fusion
            if fusion is None or budget <= 0:
                continue
            if sequence.must_choose(layerwise=layerwise):
                choosing.append(sequence)
                budget -= fusion.num_evidence_rows
        return choosing, budget

    def _fill_chunks(self, budget: int, *, layerwise: bool = False) -> list[Chunk]:
        chunks: list[Chunk] = []
        slack = (self.token_budget if self.goal is None else max(budget, 0)) // _SLACK
        for sequence in self.running:
            if sequence.phase is not Phase.PREFILL:
                continue
            for target in sequence.pending(layerwise=layerwise):
                if budget <= 0:
                    return chunks
                if isinstance(target, DocumentUse) and target.scheduled == 0:
                    target.begun = time.perf_counter()
                pending = target.num_tokens - target.scheduled
                # a small excess is cheaper than another step
                count = pending if pending <= budget + slack else budget
                stop = target.scheduled + count
                chunks.append(Chunk(sequence, target, target.scheduled, stop))
                budget -= stop - target.scheduled
                target.scheduled = stop
        return chunks


def _num_pending(sequence: Sequence) -> int:
    """Prompt tokens of the sequence that a step could compute now."""
    # `pending` yields an unscheduled lead twice
    pending = {id(target): target for target in sequence.pending()}
    return sum(target.num_tokens - target.scheduled for target in pending.values())
