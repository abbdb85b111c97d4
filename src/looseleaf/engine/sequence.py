"""A sequence: one output, the placements of its prompt with their pages, and their progress.

The order of computation has no circular wait: first the lead, then primers, then owned documents,
which read only the lead and their primer, then other text. A text run waits for all documents
before it. With blending, all text after the first blended document is one pass with the chosen
tokens."""

from collections.abc import Callable, Iterator
from enum import Enum, auto

from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.blend.fusion import Fusion, make_fusion
from looseleaf.config import Fuse, Select
from looseleaf.engine.prompt_logprobs import PromptLogprobs
from looseleaf.engine.reports.outputs import Arrivals
from looseleaf.index.host.attend import HostedRead
from looseleaf.index.host.segment import HostedSegment
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.kv.store import PendingLoad
from looseleaf.prompt.feature import Feature
from looseleaf.prompt.placements import DocumentUse, HostedUse, TextRun, reads_apart, starts_of
from looseleaf.prompt.request import DocumentPart, Request
from looseleaf.sparse import make_policy
from looseleaf.tiers import tenant_of

FindHosted = Callable[[SegmentKey], HostedSegment | None]
_READS_ALL = Select("all")


class Phase(Enum):
    """The state of a sequence."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


class Sequence:
    """One of a request's ``n`` outputs: the placements of its prompt, then its output tokens.

    The last run is the tail: the end of the prompt, which grows with the output. A preempted
    sequence starts over with its output in the tail. If it ``chooses`` the keys that its rows read,
    it decodes its output again; ``replay`` has the remaining tokens. A sequence that ``warms`` only
    computes its prompt and has an empty tail. A sequence that does not ``draw`` ends with its
    prompt. ``num_evicted`` keys of the tail were evicted. ``primers`` are those of documents that
    are not ready at the admission. A sequence that ``warms`` also computes its ``others``: its
    first document behind the primer, as later prompts read it."""

    def __init__(
        self,
        request: Request,
        index: int,
        keys: KeySpace,
        page_size: int,
        find_hosted: FindHosted = lambda key: None,
    ) -> None:
        """``keys`` is the engine's key space without the request's salt. With policy ``retrieval``
        documents of ``find_hosted`` are read in host memory."""
        self.request_id = request.request_id
        self.index = index
        self.warms = request.warms
        self.draws = not self.warms and request.params.max_tokens != 0
        self._salt = request.salt
        self.keys = keys = keys.salted(request.salt)
        self.phase = Phase.WAITING
        self.arrivals: Arrivals | None = None
        self.parts: list[TextRun | DocumentUse | HostedUse] = []
        self.owned: list[DocumentUse] = []
        self.primers: list[DocumentUse] = []
        self.others: list[DocumentUse] = []
        self.num_prompt_tokens = request.num_tokens
        self.apart = request.fuse if request.fuse and reads_apart(request) else None
        self._settled: tuple[ReadSpan, ...] | None = None
        self._num_shared = 0
        retrieves = request.select is not None and request.select.policy == "retrieval"
        chain = keys.root
        contexts: dict[int, SegmentKey] = {0: keys.root}
        known_primers: dict[int, DocumentUse] = {}
        any_document = False
        starts = starts_of(request.parts, together=self.apart is not None)
        for start, part in zip(starts, request.parts, strict=True):
            if isinstance(part, DocumentPart):
                length = part.context_length
                if length not in contexts:
                    contexts[length] = self._context(length, keys, page_size)
                context = contexts[length]
                key = part.key_behind(keys, context)
                primer = self._primer(part, context, keys, known_primers)
                primed_key = key if primer is None else part.key_behind(keys, primer[1])
                hosted = find_hosted(key) if retrieves else None
                if hosted is not None:
                    self.parts.append(HostedUse(start, part, hosted))
                elif primer is None or self.apart or not any_document:
                    # the first document follows no other, so it needs no neighbours
                    self.parts.append(DocumentUse(start, part, key))
                    if primer is not None and self.warms:
                        self.others.append(DocumentUse(start, part, primed_key, primer=primer[0]))
                else:
                    key = primed_key
                    self.parts.append(DocumentUse(start, part, key, primer=primer[0]))
                any_document = True
                # later text depends on the keys that the policy selects
                policy = repr(request.select).encode() if hosted is not None else b""
                chain = keys.placed(chain, key, policy)
            else:
                run = TextRun(start, list(part.tokens), chain, num_shared=part.num_shared)
                self.parts.append(run)
                # the key of the last run is never needed
                if len(self.parts) < len(request.parts):
                    chain = run.end_key(keys, page_size)
        tail = self.parts[-1]
        assert isinstance(tail, TextRun), "a prompt ends with text"
        self.tail = tail
        self._num_prompt_tail = tail.num_tokens
        pooled = [part for part in self.parts if not isinstance(part, HostedUse)]
        self.runs = [part for part in self.parts if isinstance(part, TextRun)]
        self.documents = [part for part in self.parts if isinstance(part, DocumentUse)]
        # documents in host memory
        self.hosted = [part for part in self.parts if isinstance(part, HostedUse)]
        self.fusion = None
        if request.fuse:
            self.fusion = make_fusion(request.fuse, pooled, page_size, request.num_given)
        self._select = request.select or _READS_ALL
        self._hosted_reads: tuple[HostedRead, ...] | None = None
        # the tail of an APE prompt can't be a prefix of another prompt
        tail.fused = tail.fused or self.apart is not None
        self.page_size = page_size
        self.policy = make_policy(request.select, page_size) if request.select else None
        self.chooses = self.policy is not None or bool(self.hosted)
        self.features: list[Feature] = []
        self.prompt_logprobs: PromptLogprobs | None = None
        params = request.params
        if params.prompt_logprobs is not None and index == 0 and not self.warms:
            self.prompt_logprobs = PromptLogprobs(
                request.token_ids, params.prompt_logprobs, params.prompt_logprobs_start, self.parts
            )
        self.num_evicted = 0
        self.replay: list[int] = []

    def _primer(
        self,
        part: DocumentPart,
        context: SegmentKey,
        keys: KeySpace,
        known: dict[int, DocumentUse],
    ) -> tuple[DocumentUse, SegmentKey] | None:
        """The primer of a document in its context, and the context behind it; None without one."""
        if part.primer is None:
            return None
        start = part.context_length
        if start not in known:
            known[start] = DocumentUse(start, part.primer, part.primer.key_behind(keys, context))
        return known[start], keys.placed(context, known[start].key)

    def _context(self, length: int, keys: KeySpace, page_size: int) -> SegmentKey:
        lead = self.lead
        assert lead is not None and length <= lead.num_tokens
        seen = TextRun(0, lead.tokens[:length], keys.root, num_shared=min(lead.num_shared, length))
        return seen.end_key(keys, page_size)

    @property
    def tenant(self) -> str:
        """The tenant that tiers count its documents for."""
        return tenant_of(self._salt)

    @property
    def uses(self) -> list[DocumentUse]:
        """All documents that hold segments: primers first, as others are computed behind them."""
        return [*self.primers, *self.documents, *self.others]

    def need_primers(self) -> None:
        """Set ``primers`` to those of documents that are not ready, so may be computed here."""
        uses = [*self.documents, *self.others]
        missing = [use for use in uses if use.segment is None or not use.segment.ready]
        self.primers = list(dict.fromkeys(use.primer for use in missing if use.primer))

    @property
    def lead(self) -> TextRun | None:
        """The text before the first document; None without it."""
        first = self.parts[0] if self.parts else None
        return first if isinstance(first, TextRun) else None

    @property
    def output_token_ids(self) -> list[int]:
        """The output tokens so far."""
        return self.tail.tokens[self._num_prompt_tail :] + self.replay

    def advance(self) -> None:
        """Append the next token of the replay, if any."""
        if self.replay:
            self.append(self.replay.pop(0))

    def num_exact(self, run: TextRun) -> int:
        """Computed tokens of ``run`` that depend only on its prefix, so other requests can reuse
        them."""
        if not self.chooses or run is not self.tail:
            return run.computed
        return min(run.computed, self._num_prompt_tail)

    @property
    def has_room(self) -> bool:
        """Whether the tail's pages have a slot for its newest token."""
        tail = self.tail
        return len(tail.tokens) - self.num_evicted <= len(tail.pages) * self.page_size

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        output = len(self.tail.tokens) - self._num_prompt_tail + len(self.replay)
        return self.num_prompt_tokens + output

    @property
    def num_computed(self) -> int:
        """Tokens of prompt and output with keys and values in the cache, computed or reused."""
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
        """Whether a warming sequence has computed its documents, or its text without documents."""
        if self.documents:
            uses = [*self.documents, *self.others]
            return all(use.segment is not None and use.segment.ready for use in uses)
        return all(run.computed == run.num_tokens for run in self.runs)

    def append(self, token: int) -> None:
        """Append an output token, or the placeholder of a token that is still on the device."""
        self.tail.tokens.append(token)

    def drop_awaited(self) -> None:
        """Remove the placeholder, after the launch of the step that reads it."""
        self.tail.tokens.pop()

    def spans_before(self, run: TextRun) -> tuple[ReadSpan, ...]:
        """The spans of all placements before ``run``, without documents of APE."""
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
        """The reads of host-resident documents before ``run``."""
        if not self.hosted:
            return ()
        return tuple(use.read(self._select) for use in self.hosted if use.start < run.start)

    @property
    def hosted_reads(self) -> tuple[HostedRead, ...]:
        """The reads of host-resident documents by decode rows."""
        if self._hosted_reads is None:
            self._hosted_reads = self.hosted_before(self.tail)
        return self._hosted_reads

    def decode_row(self) -> DecodeRow:
        """The row of the newest token, which reads all keys in the pool up to itself."""
        tail, settled = self.tail, self._settled
        if settled is None:
            fusion = self.fusion
            settled = self._settled = fusion.settled() if fusion else self.spans_before(tail)
            self._num_shared = tail.num_shared_pages()
        num_tokens = len(tail.tokens)
        own = ReadSpan(tail.pages, tail.start, num_tokens - self.num_evicted, self._num_shared)
        return DecodeRow(tail.start + num_tokens - 1, settled, own)

    def decode_rows(self, num_outputs: int, num_new_rows: int) -> list[DecodeRow]:
        """The row of the newest token, then the rows that features add, in a step with
        ``num_outputs`` decoding outputs and ``num_new_rows`` prompt rows."""
        rows = [self.decode_row()]
        for feature in self.features:
            rows = feature.rows(self, rows, num_outputs, num_new_rows)
        return rows

    def pending(self, *, layerwise: bool = False) -> Iterator[TextRun | DocumentUse | Fusion]:
        """Placements that a step may compute now, in order.

        Text waits for all documents before it. With ``layerwise`` a loading document counts as
        ready, because the step waits for it layer by layer."""
        if self.warms and self.warm:
            return
        lead = self.lead
        if lead is not None and lead.scheduled < lead.num_tokens:
            yield lead
        for use in list(self.owned):
            primer = use.primer
            behind = primer is None or primer.num_tokens == 0 or self._ready(primer, False)
            if behind and use.scheduled < use.num_tokens:
                yield use
        fusion = self.fusion
        for part in self.parts:
            if fusion is not None and part is fusion.parts[0]:
                ready = all(self._ready(use, layerwise) for use in fusion.documents)
                if ready and fusion.chosen and fusion.scheduled < fusion.num_tokens:
                    yield fusion
                return
            if isinstance(part, TextRun):
                if part.scheduled < part.num_tokens:
                    yield part
            elif isinstance(part, DocumentUse) and not self._ready(part, layerwise):
                return

    def arriving(self, stop: TextRun | None = None) -> list[PendingLoad]:
        """The loads in progress of documents before ``stop``, or of all documents."""
        parts = self.parts if stop is None else self.parts[: self.parts.index(stop)]
        segments = [part.segment for part in parts if isinstance(part, DocumentUse)]
        return [s.arriving for s in segments if s is not None and s.arriving is not None]

    def must_choose(self, *, layerwise: bool = False) -> bool:
        """Whether token scoring is due: its documents and the text before them are ready.

        With ``layerwise`` a loading document counts as ready."""
        fusion = self.fusion
        if fusion is None or fusion.chosen or self.phase is not Phase.PREFILL:
            return False
        before = self.parts[: self.parts.index(fusion.parts[0])]
        return all(self._is_there(use, layerwise) for use in self.documents) and all(
            run.computed == run.num_tokens for run in before if isinstance(run, TextRun)
        )

    @property
    def decodes(self) -> bool:
        """Whether the sequence decodes."""
        return self.phase is Phase.DECODE

    def spans_apart(self) -> tuple[ReadSpan, ...]:
        """The spans of the documents with APE; empty without."""
        return tuple(use.span() for use in self.documents if use.num_tokens) if self.apart else ()

    @property
    def fuse_in_force(self) -> Fuse | None:
        """The blending policy of this sequence; None for plain reuse."""
        return self.fusion.fuse if self.fusion else self.apart

    def private_pages(self) -> list[int]:
        """Pages that belong to no segment."""
        owners = [pair for run in self.runs for pair in zip(run.pages, run.segments, strict=True)]
        pages = [page for page, segment in owners if segment is None]
        return pages + (self.fusion.pages if self.fusion else [])

    def recomputed(self) -> list[int]:
        """The number of chosen tokens of each document; 0 before the choice."""
        blended = self.fusion.num_chosen() if self.fusion else []
        return [0] * (len(self.documents) - len(blended)) + blended

    def _ready(self, use: DocumentUse, layerwise: bool) -> bool:
        return self._is_there(use, layerwise) or self._in_step(use)

    def _is_there(self, use: DocumentUse, layerwise: bool) -> bool:
        segment = use.segment
        if segment is None:
            return False
        return segment.ready or (layerwise and segment.arriving is not None)

    def _in_step(self, use: DocumentUse) -> bool:
        """Whether an owned document is complete once this step's chunks are written."""
        return any(o.segment is use.segment and o.scheduled == o.num_tokens for o in self.owned)

    def reset(self) -> None:
        """Drop all pages and return to the state before admission; the output becomes text."""
        for part in self.parts:
            if isinstance(part, HostedUse):
                continue
            part.computed = part.scheduled = 0
            if isinstance(part, TextRun):
                part.pages, part.segments = [], []
            else:
                part.segment = None
        for use in (*self.primers, *self.others):
            use.computed = use.scheduled = 0
            use.segment = None
        self.owned, self.primers = [], []
        self._settled = self._hosted_reads = None
        if self.chooses:
            self.replay = self.output_token_ids
            del self.tail.tokens[self._num_prompt_tail :]
        if self.fusion is not None:
            self.fusion.reset()
        self.num_evicted = 0
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.reset()
        for feature in self.features:
            feature.reset()
        self.phase = Phase.WAITING
