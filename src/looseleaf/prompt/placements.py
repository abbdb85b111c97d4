"""The parts of one sequence with their pages: runs of text, and uses of documents."""

from dataclasses import dataclass, field

from looseleaf.attention.host.attend import HostedRead
from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.config import Select, share_of
from looseleaf.kv.hosted import HostedSegment
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.kv.store import Segment
from looseleaf.prompt.request import DocumentPart
from looseleaf.sparse import Schedule


@dataclass(eq=False)
class TextRun:
    """A run of text that starts at position ``start`` behind the chain ``context``.

    ``segments[n]`` is the segment that owns page n, None while the sequence owns it itself.
    ``scheduled`` runs ahead of ``computed`` during a step. The first ``num_shared`` tokens are the
    service's own; only the first run of a prompt has any. A ``fused`` run sees tokens that only its
    own request computed again, so its pages are no prefix of another's. While its sequence waits,
    ``awaits`` is the last page that it was found to wait for, which another one computes."""

    start: int
    tokens: list[int]
    context: SegmentKey
    num_shared: int = 0
    fused: bool = False
    pages: list[int] = field(default_factory=list)
    segments: list[Segment | None] = field(default_factory=list)
    computed: int = 0
    scheduled: int = 0
    awaits: SegmentKey | None = None
    _keys: list[SegmentKey] = field(default_factory=list)
    _shared: tuple[list[Segment | None], int] = field(default_factory=lambda: ([], 0))

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
        if len(self._keys) <= page:
            self._keys += self._more_keys((page + 1) * page_size, keys, page_size)
        return self._keys[page]

    def page_keys(self, count: int, keys: KeySpace, page_size: int) -> list[SegmentKey]:
        """The keys of the first ``count`` pages, which are full: made at once, they take a third of
        the time."""
        if count:
            self.page_key(count - 1, keys, page_size)
        return self._keys[:count]

    def _more_keys(self, stop: int, keys: KeySpace, page_size: int) -> list[SegmentKey]:
        """The keys of the pages of tokens before ``stop`` that have none so far."""
        start, more = len(self._keys) * page_size, list[SegmentKey]()
        shared = min(stop, self.num_shared // page_size * page_size)
        if start < shared:
            before = self._keys[-1] if self._keys else keys.shared_root
            tokens = self.tokens[start:shared]
            more = keys.text_pages(before, tokens, page_size, shared=True)
            start = shared
        found = [*self._keys[-1:], *more[-1:]]
        before = found[-1] if found else self.context
        return more + keys.text_pages(before, self.tokens[start:stop], page_size)

    def end_key(self, keys: KeySpace, page_size: int) -> SegmentKey:
        """The chain after the run."""
        full = self.num_tokens // page_size
        before = self.page_key(full - 1, keys, page_size) if full else self.context
        return keys.text_end(before, self.tokens[full * page_size :])

    def num_shared_pages(self) -> int:
        """Leading pages that a segment owns, so that others may read them."""
        # a page that has an owner keeps it for as long as the list is this one
        counted, count = self._shared
        count = count if counted is self.segments else 0
        while count < len(self.segments) and self.segments[count] is not None:
            count += 1
        self._shared = self.segments, count
        return count

    def span(self, length: int) -> ReadSpan:
        """The first ``length`` keys of the run."""
        return ReadSpan(self.pages, self.start, length, self.num_shared_pages())


@dataclass(eq=False)
class HostedUse:
    """A hosted document at position ``start``, which takes no page: it is read where it lies."""

    start: int
    part: DocumentPart
    segment: HostedSegment

    @property
    def num_tokens(self) -> int:
        return len(self.part.tokens)

    def read(self, select: Select) -> HostedRead:
        """What rows behind it read of it, under a ``retrieval`` policy.

        The budget holds the tokens that are always read; at least one is found besides."""
        dense = frozenset(select.layers_read_densely)
        index = self.segment.index
        if index is None or self.start + self.num_tokens <= (select.dense_below or 0):
            return HostedRead(self.segment, self.start)
        tokens = select.tokens
        if tokens is None:
            assert select.ratio is not None
            tokens = share_of(select.ratio, self.num_tokens)
        always = self.num_tokens - len(index.indexed)
        count = max(1, tokens - always)
        if select.layer_budgets == "flat":
            return HostedRead(self.segment, self.start, count, dense)
        # the ends that are always read are in the budget of every layer
        num_layers, most = len(self.segment.kv), len(index.indexed)
        counts = Schedule.of(select).spread(max(0, count - 1), max(0, most - 1), num_layers)
        each = tuple(1 + more for more in counts)
        return HostedRead(self.segment, self.start, count, dense, each)


def keys_of(read: HostedRead) -> tuple[int, int]:
    """The keys that one query head reads so, of how many, summed over layers.

    They are known before the search: an index finds as many as it is asked for."""
    num_layers, there = len(read.segment.kv), read.segment.num_tokens
    keys = 0
    for layer in range(num_layers):
        index = read.index_at(layer)
        found = 0 if index is None else len(index.indexed)
        keys += there - found + min(read.count_at(layer), found)
    return keys, num_layers * there


@dataclass(eq=False)
class DocumentUse:
    """A document at position ``start``; encoded at ``context_length``, behind that much of the
    lead.

    ``seconds`` says how long its keys and values took to be there, from ``begun``: the admission,
    or the step that began to compute it here. ``tier`` is where it comes from, if it does;
    ``fell_back`` says that it could not be loaded, and is computed."""

    start: int
    part: DocumentPart
    key: SegmentKey
    segment: Segment | None = None
    computed: int = 0
    scheduled: int = 0
    begun: float = 0.0
    seconds: float | None = None
    tier: str | None = None
    fell_back: bool = False

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
