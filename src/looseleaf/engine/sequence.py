"""One output in the making: the parts of its prompt with their pages, and how far each is computed.

A sequence computes its parts in an order that never waits in a circle: the lead, then the documents
it owns, which see the lead only, then its other text, each run once all documents before it are
ready."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from looseleaf.attention.groups import DecodeRow, ReadSpan
from looseleaf.attention.plan import PrefillChunk
from looseleaf.engine.request import DocumentPart, Request
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.kv.store import Segment


@dataclass(eq=False)
class TextRun:
    """A run of text that starts at position ``start`` behind the chain ``context``.

    ``segments[n]`` is the segment that owns page n, None while the sequence owns it itself.
    ``scheduled`` runs ahead of ``computed`` during a step. The first ``num_shared`` tokens are the
    service's own; only the first run of a prompt has any."""

    start: int
    tokens: list[int]
    context: SegmentKey
    num_shared: int = 0
    pages: list[int] = field(default_factory=list)
    segments: list[Segment | None] = field(default_factory=list)
    computed: int = 0
    scheduled: int = 0
    _keys: list[SegmentKey] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def write_pages(self) -> list[int]:
        """Where new keys and values go."""
        return self.pages

    def position(self, index: int) -> int:
        """The position of the token at ``index`` of the run."""
        return self.start + index

    def page_key(self, page: int, keys: KeySpace, page_size: int) -> SegmentKey:
        """The key of a full page: the chain of everything before it, and its tokens."""
        while len(self._keys) <= page:
            n = len(self._keys)
            tokens = self.tokens[n * page_size : (n + 1) * page_size]
            if (n + 1) * page_size <= self.num_shared:
                before = self._keys[-1] if self._keys else keys.shared_root
                self._keys.append(keys.shared_page(before, tokens))
            else:
                before = self._keys[-1] if self._keys else self.context
                self._keys.append(keys.text_page(before, tokens))
        return self._keys[page]

    def end_key(self, keys: KeySpace, page_size: int) -> SegmentKey:
        """The chain after the run."""
        full = self.num_tokens // page_size
        before = self.page_key(full - 1, keys, page_size) if full else self.context
        return keys.text_end(before, self.tokens[full * page_size :])

    def num_shared_pages(self) -> int:
        """Leading pages that a segment owns, so that others may read them."""
        return next((n for n, s in enumerate(self.segments) if s is None), len(self.segments))

    def span(self, length: int) -> ReadSpan:
        """The first ``length`` keys of the run."""
        return ReadSpan(self.pages, self.start, length, self.num_shared_pages())


@dataclass(eq=False)
class DocumentUse:
    """A document at position ``start``; encoded at ``context_length``, behind that much of the
    lead.

    ``seconds`` says how long its keys and values took to be there, from ``begun``: the admission,
    or the step that began to compute it here."""

    start: int
    part: DocumentPart
    key: SegmentKey
    segment: Segment | None = None
    computed: int = 0
    scheduled: int = 0
    begun: float = 0.0
    seconds: float | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.part.tokens

    @property
    def num_tokens(self) -> int:
        return len(self.part.tokens)

    @property
    def write_pages(self) -> tuple[int, ...]:
        """Where new keys and values go."""
        return self._held().pages

    def position(self, index: int) -> int:
        """The position at which the token at ``index`` is encoded: directly behind its context."""
        return self.part.context_length + index

    def span(self) -> ReadSpan:
        """The whole document, where this sequence has it."""
        segment = self._held()
        return ReadSpan(segment.pages, self.start, segment.length, len(segment.pages))

    def _held(self) -> Segment:
        assert self.segment is not None, "a document is read or written only while admitted"
        return self.segment


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start:stop`` of a run or a document that a step computes."""

    sequence: "Sequence"
    target: TextRun | DocumentUse
    start: int
    stop: int

    def tokens(self) -> list[int]:
        return list(self.target.tokens[self.start : self.stop])

    def prefill(self) -> PrefillChunk:
        """The chunk's rows as the attention plan knows them."""
        target = self.target
        positions = range(target.position(self.start), target.position(self.stop))
        if isinstance(target, TextRun):
            spans = self.sequence.spans_before(target)
            return PrefillChunk(positions, (*spans, target.span(self.stop)))
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
    that was preempted starts over with its output as part of the tail. One that ``warms`` computes
    its prompt and no more; its tail is empty."""

    def __init__(self, request: Request, index: int, keys: KeySpace, page_size: int) -> None:
        """``keys`` are the engine's; the request's salt joins them here."""
        self.request_id = request.request_id
        self.index = index
        self.warms = request.warms
        self.keys = keys = keys.salted(request.salt)
        self.phase = Phase.WAITING
        self.parts: list[TextRun | DocumentUse] = []
        self.owned: list[DocumentUse] = []
        self.num_prompt_tokens = 0
        self._settled: tuple[ReadSpan, ...] | None = None
        self._num_shared = 0
        chain = keys.root
        contexts: dict[int, SegmentKey] = {0: keys.root}
        for part in request.parts:
            if isinstance(part, DocumentPart):
                if part.context_length not in contexts:
                    contexts[part.context_length] = self._context(
                        part.context_length, keys, page_size
                    )
                key = keys.document(contexts[part.context_length], part.tokens)
                self.parts.append(DocumentUse(self.num_prompt_tokens, part, key))
                chain = keys.placed(chain, key)
            else:
                run = TextRun(
                    self.num_prompt_tokens, list(part.tokens), chain, num_shared=part.num_shared
                )
                self.parts.append(run)
                chain = run.end_key(keys, page_size)
            self.num_prompt_tokens += len(part.tokens)
        tail = self.parts[-1]
        assert isinstance(tail, TextRun), "a prompt ends with text"
        self.tail = tail
        self._num_prompt_tail = tail.num_tokens

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
    def output_token_ids(self) -> list[int]:
        """What was produced so far."""
        return self.tail.tokens[self._num_prompt_tail :]

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.tail.start + self.tail.num_tokens

    @property
    def num_computed(self) -> int:
        """Tokens of prompt and output whose keys and values are there, computed or reused."""
        total = 0
        for part in self.parts:
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
        """All parts before ``run``, whole."""
        spans = []
        for part in self.parts:
            if part is run:
                break
            spans.append(
                part.span() if isinstance(part, DocumentUse) else part.span(part.num_tokens)
            )
        return tuple(spans)

    def decode_row(self) -> DecodeRow:
        """The row of the newest token, which sees everything up to itself."""
        if self._settled is None:
            self._settled = self.spans_before(self.tail)
            self._num_shared = self.tail.num_shared_pages()
        tail = self.tail
        own = ReadSpan(tail.pages, tail.start, tail.num_tokens, self._num_shared)
        return DecodeRow(self.num_tokens - 1, self._settled, own)

    def pending(self) -> Iterator[TextRun | DocumentUse]:
        """Parts that may be computed now, in order; a document not ready holds back the text behind
        it.
        """
        if self.warms and self.warm:
            return
        lead = self.lead
        if lead is not None and lead.scheduled < lead.num_tokens:
            yield lead
        yield from [use for use in self.owned if use.scheduled < use.num_tokens]
        for part in self.parts:
            if isinstance(part, TextRun):
                if part.scheduled < part.num_tokens:
                    yield part
            elif not (part.segment is not None and (part.segment.ready or self._in_step(part))):
                return

    def _in_step(self, use: DocumentUse) -> bool:
        """Whether an owned document is complete once this step's chunks are written."""
        return any(o.segment is use.segment and o.scheduled == o.num_tokens for o in self.owned)

    def reset(self) -> None:
        """Forget all pages: back to the state before admission, with the output kept as text."""
        for part in self.parts:
            part.computed = part.scheduled = 0
            if isinstance(part, TextRun):
                part.pages, part.segments = [], []
            else:
                part.segment = None
        self.owned = []
        self._settled = None
        self.phase = Phase.WAITING
