"""One output in the making: the parts of its prompt with their pages, and how far each is computed.

A sequence computes its parts in an order that never waits in a circle: the lead, then the documents
it owns, which see the lead only, then its other text, each run once all documents before it are
ready. Where documents are blended, all text behind the first of them is one pass, with the tokens
that are computed again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from looseleaf.attention.chunks import PrefillChunk
from looseleaf.attention.groups import DecodeRow, ReadSpan
from looseleaf.attention.hosted import HostedRead
from looseleaf.attention.listed_scores import says_how_many
from looseleaf.attention.selection import SelectingRow
from looseleaf.config import Fuse, Select
from looseleaf.engine.arrivals import Arrivals
from looseleaf.engine.fusion import Fusion, make_fusion
from looseleaf.engine.parts import DocumentUse, HostedUse, TextRun
from looseleaf.engine.placing import reads_apart, starts_of
from looseleaf.engine.request import DocumentPart, Request
from looseleaf.engine.revised_rows import Revision
from looseleaf.kv.hosted import HostedSegment
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.kv.store import Arriving
from looseleaf.sparse import Eviction, make_policy
from looseleaf.tiers import tenant_of

IntArray = npt.NDArray[np.int64]
FindHosted = Callable[[SegmentKey], HostedSegment | None]
_READS_ALL = Select("all")


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start:stop`` of a run, a document or a fusion that a step computes."""

    sequence: "Sequence"
    target: TextRun | DocumentUse | Fusion
    start: int
    stop: int

    @property
    def ends_prompt(self) -> bool:
        """Whether the chunk's last row yields the next token's logits."""
        last = self.target is self.sequence.tail or self.target is self.sequence.fusion
        return last and self.stop == self.target.num_tokens

    def awaits(self) -> list[Arriving]:
        """The documents that its rows read, as far as they are still arriving."""
        if isinstance(self.target, DocumentUse):
            return []
        stop = self.target if isinstance(self.target, TextRun) else None
        return self.sequence.arriving(stop)

    def table(self, page_size: int) -> IntArray:
        """Token, slot and place in its segment of every row, int64 ``[3, rows]``."""
        target = self.target
        if isinstance(target, Fusion):
            return target.rows.table[:, self.start : self.stop]
        places = np.arange(self.start, self.stop)
        pages = np.asarray(target.write_pages)[places // page_size]
        tokens = np.asarray(target.tokens[self.start : self.stop])
        return np.stack([tokens, pages * page_size + places % page_size, places])

    def prefill(self) -> PrefillChunk:
        """The chunk's rows as the attention plan knows them."""
        target = self.target
        if isinstance(target, Fusion):
            return target.prefill(self.start, self.stop)
        positions = range(target.position(self.start), target.position(self.stop))
        if isinstance(target, TextRun):
            spans = self.sequence.spans_before(target)
            hosted = self.sequence.hosted_before(target)
            return PrefillChunk(positions, (*spans, target.span(self.stop)), hosted)
        own = ReadSpan(target.write_pages, target.part.context_length, self.stop, 0)
        lead = self.sequence.lead
        if lead is None or target.part.context_length == 0:
            return PrefillChunk(positions, (own,))
        return PrefillChunk(positions, (lead.span(target.part.context_length), own))


class Phase(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


class Sequence:
    """One of a request's ``n`` outputs: the parts of its prompt, then the tokens it has produced.

    The last run is the tail: it holds the end of the prompt and grows with the output. A sequence
    that was preempted starts over with its output as part of the tail; if it has a policy, its
    output came of what its rows chose, and is decoded again token by token: ``replay`` has those
    still to come. One that ``warms`` computes its prompt and no more; its tail is empty."""

    def __init__(
        self,
        request: Request,
        index: int,
        keys: KeySpace,
        page_size: int,
        find_hosted: FindHosted = lambda key: None,
    ) -> None:
        """``keys`` are the engine's; the request's salt joins them here. With policy ``retrieval``
        the documents that ``find_hosted`` knows are read where they lie."""
        self.request_id = request.request_id
        self.index = index
        self.warms = request.warms
        self.tenant = tenant_of(request.salt)
        self.keys = keys = keys.salted(request.salt)
        self.phase = Phase.WAITING
        self.arrivals: Arrivals | None = None
        self.parts: list[TextRun | DocumentUse | HostedUse] = []
        self.owned: list[DocumentUse] = []
        self.num_prompt_tokens = request.num_tokens
        self.apart: Fuse | None = request.fuse if reads_apart(request) else None
        self._settled: tuple[ReadSpan, ...] | None = None
        self._num_shared = 0
        retrieves = request.select is not None and request.select.policy == "retrieval"
        chain = keys.root
        contexts: dict[int, SegmentKey] = {0: keys.root}
        starts = starts_of(request.parts, together=self.apart is not None)
        for start, part in zip(starts, request.parts, strict=True):
            if isinstance(part, DocumentPart):
                if part.context_length not in contexts:
                    contexts[part.context_length] = self._context(
                        part.context_length, keys, page_size
                    )
                key = part.key_behind(keys, contexts[part.context_length])
                hosted = find_hosted(key) if retrieves else None
                if hosted is not None:
                    self.parts.append(HostedUse(start, part, hosted))
                else:
                    self.parts.append(DocumentUse(start, part, key))
                # what stands behind was not computed from all of it
                policy = repr(request.select).encode() if hosted is not None else b""
                chain = keys.placed(chain, key, policy)
            else:
                run = TextRun(start, list(part.tokens), chain, num_shared=part.num_shared)
                self.parts.append(run)
                # behind the last run nothing stands that would have to know it
                if len(self.parts) < len(request.parts):
                    chain = run.end_key(keys, page_size)
        tail = self.parts[-1]
        assert isinstance(tail, TextRun), "a prompt ends with text"
        self.tail = tail
        self._num_prompt_tail = tail.num_tokens
        pooled = [part for part in self.parts if not isinstance(part, HostedUse)]
        self.fusion = make_fusion(request.fuse, pooled, page_size)
        self._select = request.select or _READS_ALL
        self._hosted: tuple[HostedRead, ...] | None = None
        # what the tail's tokens read is no other prompt's
        tail.fused = tail.fused or self.apart is not None
        self.page_size = page_size
        self.policy = make_policy(request.select, page_size)
        self.revision: Revision | None = None
        self.eviction: Eviction | None = None
        self.replay: list[int] = []

    def _context(self, length: int, keys: KeySpace, page_size: int) -> SegmentKey:
        lead = self.lead
        assert lead is not None and length <= lead.num_tokens
        seen = TextRun(0, lead.tokens[:length], keys.root, num_shared=min(lead.num_shared, length))
        return seen.end_key(keys, page_size)

    @property
    def lead(self) -> TextRun | None:
        """The text before the first document, if there is any."""
        first = self.parts[0] if self.parts else None
        return first if isinstance(first, TextRun) else None

    @property
    def runs(self) -> list[TextRun]:
        return [part for part in self.parts if isinstance(part, TextRun)]

    @property
    def documents(self) -> list[DocumentUse]:
        return [part for part in self.parts if isinstance(part, DocumentUse)]

    @property
    def hosted(self) -> list[HostedUse]:
        """The documents that are read outside of the pool."""
        return [part for part in self.parts if isinstance(part, HostedUse)]

    @property
    def output_token_ids(self) -> list[int]:
        """What was produced so far."""
        return self.tail.tokens[self._num_prompt_tail :] + self.replay

    def advance(self) -> None:
        """A step computed the newest token: while it replays, the next one is known."""
        if self.replay:
            self.append(self.replay.pop(0))

    def num_exact(self, run: TextRun) -> int:
        """Computed tokens of ``run`` that any request with the same prefix would compute alike."""
        if not self.chooses or run is not self.tail:
            return run.computed
        return min(run.computed, self._num_prompt_tail)

    @property
    def chooses(self) -> bool:
        """Whether its output comes of what its rows choose to read."""
        return self.policy is not None or bool(self.hosted)

    @property
    def num_evicted(self) -> int:
        """Keys of the tail that were thrown away."""
        return self.eviction.num_evicted if self.eviction is not None else 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        output = len(self.tail.tokens) - self._num_prompt_tail + len(self.replay)
        return self.num_prompt_tokens + output

    @property
    def num_computed(self) -> int:
        """Tokens of prompt and output whose keys and values are there, computed or reused."""
        total = 0
        for part in self.parts:
            if isinstance(part, HostedUse):
                total += part.num_tokens
                continue
            ready = (
                isinstance(part, DocumentUse) and part.segment is not None and part.segment.ready
            )
            total += part.num_tokens if ready else part.computed
        return total

    @property
    def warm(self) -> bool:
        """Whether a sequence that warms has all that it was to compute: its documents if it has
        any, else its text."""
        if self.documents:
            return all(use.segment is not None and use.segment.ready for use in self.documents)
        return all(run.computed == run.num_tokens for run in self.runs)

    def append(self, token: int) -> None:
        """One more output token, or a stand-in for one that the device has and the host awaits."""
        self.tail.tokens.append(token)

    def drop_awaited(self) -> None:
        """Take the stand-in back: the step that reads the token itself is launched."""
        self.tail.tokens.pop()

    def spans_before(self, run: TextRun) -> tuple[ReadSpan, ...]:
        """All parts before ``run``, whole; without documents that are read apart."""
        spans = []
        for part in self.parts:
            if part is run:
                break
            if isinstance(part, HostedUse) or (self.apart and isinstance(part, DocumentUse)):
                continue
            spans.append(
                part.span() if isinstance(part, DocumentUse) else part.span(part.num_tokens)
            )
        return tuple(spans)

    def hosted_before(self, run: TextRun) -> tuple[HostedRead, ...]:
        """The reads of hosted documents before ``run``."""
        if not self.hosted:
            return ()
        return tuple(use.read(self._select) for use in self.hosted if use.start < run.start)

    def decode_row(self) -> DecodeRow:
        """The row of the newest token, which sees everything up to itself, or chooses from it."""
        if self._settled is None:
            fusion = self.fusion
            self._settled = fusion.settled() if fusion else self.spans_before(self.tail)
            self._num_shared = self.tail.num_shared_pages()
            self._hosted = self.hosted_before(self.tail)
        tail, num_tokens = self.tail, len(self.tail.tokens)
        stored = num_tokens - self.num_evicted
        own = ReadSpan(tail.pages, tail.start, stored, self._num_shared)
        position = tail.start + num_tokens - 1
        if self.policy is not None and self.num_tokens > (self._select.dense_below or 0):
            # the newest token's page is not full before it is stored
            sealed = (num_tokens - 1) // self.page_size
            every = self._select.recall_every
            measured = every > 0 and len(self.output_token_ids) % every == 0
            row = SelectingRow(position, self._settled, own, self.policy, sealed, measured=measured)
            most = row.num_candidates
            limit = self.policy.limit(most, row.num_other(self.page_size))
            # where there is nothing to choose from yet, whatever is wanted is read
            if most and (limit < most or says_how_many(self.policy)):
                return row
        return DecodeRow(position, self._settled, own, hosted=self._hosted or ())

    def decode_rows(self, num_outputs: int, num_new_rows: int) -> list[DecodeRow]:
        """The rows of a step in which ``num_outputs`` decode beside ``num_new_rows`` of prompts:
        that of the newest token, then those of earlier ones that are revised.
        """
        row, revision = self.decode_row(), self.revision
        return [row] if revision is None else revision.rows(row, num_outputs, num_new_rows)

    def pending(self, *, following: bool = False) -> Iterator[TextRun | DocumentUse | Fusion]:
        """Parts that may be computed now, in order; a document not ready holds back the text behind
        it, but for one that is arriving if a step may be ``following`` it layer by layer.
        """
        if self.warms and self.warm:
            return
        lead = self.lead
        if lead is not None and lead.scheduled < lead.num_tokens:
            yield lead
        yield from [use for use in self.owned if use.scheduled < use.num_tokens]
        fusion = self.fusion
        for part in self.parts:
            if fusion is not None and part is fusion.parts[0]:
                ready = all(self._ready(use, following) for use in fusion.documents)
                if ready and fusion.chosen and fusion.scheduled < fusion.num_tokens:
                    yield fusion
                return
            if isinstance(part, TextRun):
                if part.scheduled < part.num_tokens:
                    yield part
            elif isinstance(part, DocumentUse) and not self._ready(part, following):
                return

    def arriving(self, stop: TextRun | None = None) -> list[Arriving]:
        """The documents in front of ``stop``, or all, as far as they are still arriving."""
        parts = self.parts if stop is None else self.parts[: self.parts.index(stop)]
        held = [part.segment for part in parts if isinstance(part, DocumentUse)]
        return [s.arriving for s in held if s is not None and s.arriving is not None]

    def must_choose(self, *, following: bool = False) -> bool:
        """Whether all is there that tells which tokens are computed again, and they are not chosen;
        documents that are arriving too, if a step may be ``following`` them layer by layer.
        """
        fusion = self.fusion
        if fusion is None or fusion.chosen or self.phase is not Phase.PREFILL:
            return False
        before = self.parts[: self.parts.index(fusion.parts[0])]
        return all(self._is_there(use, following) for use in self.documents) and all(
            run.computed == run.num_tokens for run in before if isinstance(run, TextRun)
        )

    def spans_apart(self) -> tuple[ReadSpan, ...]:
        """The documents, where they are read apart."""
        return tuple(use.span() for use in self.documents if use.num_tokens) if self.apart else ()

    @property
    def fuse_in_force(self) -> Fuse | None:
        """The policy by which this sequence's documents meet; None for plain reuse."""
        return self.fusion.fuse if self.fusion else self.apart

    def private_pages(self) -> list[int]:
        """Pages that no segment owns."""
        owners = [pair for run in self.runs for pair in zip(run.pages, run.segments, strict=True)]
        pages = [page for page, segment in owners if segment is None]
        return pages + (self.fusion.pages if self.fusion else [])

    def recomputed(self) -> list[int]:
        """How many tokens of each document this sequence computes again, as far as it is known."""
        blended = self.fusion.num_chosen() if self.fusion else []
        return [0] * (len(self.documents) - len(blended)) + blended

    def _ready(self, use: DocumentUse, following: bool) -> bool:
        return self._is_there(use, following) or self._in_step(use)

    def _is_there(self, use: DocumentUse, following: bool) -> bool:
        segment = use.segment
        if segment is None:
            return False
        return segment.ready or (following and segment.arriving is not None)

    def _in_step(self, use: DocumentUse) -> bool:
        """Whether an owned document is complete once this step's chunks are written."""
        return any(o.segment is use.segment and o.scheduled == o.num_tokens for o in self.owned)

    def reset(self) -> None:
        """Forget all pages: back to the state before admission, with the output kept as text."""
        for part in self.parts:
            if isinstance(part, HostedUse):
                continue
            part.computed = part.scheduled = 0
            if isinstance(part, TextRun):
                part.pages, part.segments = [], []
            else:
                part.segment = None
        self.owned = []
        self._settled = None
        if self.chooses or self.eviction is not None:
            self.replay = self.output_token_ids
            del self.tail.tokens[self._num_prompt_tail :]
        if self.fusion is not None:
            self.fusion.reset()
        if self.revision is not None:
            self.revision.release()
        if self.eviction is not None:
            self.eviction.reset()
        self.phase = Phase.WAITING
