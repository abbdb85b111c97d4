"""The parts of one sequence with their pages and positions: runs of text, and uses of documents.

Positions are consecutive, or all documents begin at the same position (APE, arXiv 2502.05431): at
the end of the text before the first document, as they were encoded. The text after the documents
begins at the end of the longest document. Text reads documents as a separate set of keys
(`looseleaf.blend.ape`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.config import ModelConfig, Select, share_of
from looseleaf.errors import InvalidOption
from looseleaf.index.host.attend import HostedRead
from looseleaf.index.host.segment import HostedSegment
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.kv.store import Segment
from looseleaf.prompt.request import DocumentPart, Request, TextPart
from looseleaf.sparse import Schedule


@dataclass(eq=False)
class TextRun:
    """A run of text that starts at position ``start`` after the chain ``context``.

    ``segments[n]`` is the segment that owns page n, None while the sequence owns it.
    ``scheduled`` exceeds ``computed`` during a step. The first ``num_shared`` tokens belong to the
    service; only the first run of a prompt has such tokens. A ``fused`` run sees tokens that only
    its request computed again, so other requests can't use its pages as a prefix. ``awaits`` is the
    last page of another sequence that a waiting sequence waited for."""

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
        """The pages of new keys and values."""
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
        """The keys of the first ``count`` pages, which are full. One call takes a third of the time
        of single calls."""
        if count:
            self.page_key(count - 1, keys, page_size)
        return self._keys[:count]

    def _more_keys(self, stop: int, keys: KeySpace, page_size: int) -> list[SegmentKey]:
        """The keys of the pages before token ``stop`` that have no key yet."""
        start, more = len(self._keys) * page_size, list[SegmentKey]()
        shared = min(stop, self.num_shared // page_size * page_size)
        if start < shared:
            before = self._keys[-1] if self._keys else keys.shared_root
            tokens = self.tokens[start:shared]
            more = keys.text_pages(before, tokens, page_size, shared=True)
            start = shared
        ends = [*self._keys[-1:], *more[-1:]]
        before = ends[-1] if ends else self.context
        return more + keys.text_pages(before, self.tokens[start:stop], page_size)

    def end_key(self, keys: KeySpace, page_size: int) -> SegmentKey:
        """The chain after the run."""
        full = self.num_tokens // page_size
        before = self.page_key(full - 1, keys, page_size) if full else self.context
        return keys.text_end(before, self.tokens[full * page_size :])

    def num_shared_pages(self) -> int:
        """The number of leading pages that segments own, so that other sequences may read them."""
        # a page keeps its owner as long as the list is the same object
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
    """A hosted document at position ``start``, read from host memory; it takes no page."""

    start: int
    part: DocumentPart
    segment: HostedSegment

    @property
    def num_tokens(self) -> int:
        return len(self.part.tokens)

    def read(self, select: Select) -> HostedRead:
        """The read of this document by later rows, under a ``retrieval`` policy.

        The budget includes the tokens that are always read; the index adds at least one token."""
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
        # the budget of every layer includes the ends that are always read
        num_layers, most = len(self.segment.kv), len(index.indexed)
        counts = Schedule.of(select).spread(max(0, count - 1), max(0, most - 1), num_layers)
        each = tuple(1 + more for more in counts)
        return HostedRead(self.segment, self.start, count, dense, each)


def keys_of(read: HostedRead) -> tuple[int, int]:
    """The number of keys that one query head reads, and the number it could read, over all layers.

    The numbers need no search, because an index returns as many keys as requested."""
    num_layers, there = len(read.segment.kv), read.segment.num_tokens
    keys = 0
    for layer in range(num_layers):
        index = read.index_at(layer)
        indexed = 0 if index is None else len(index.indexed)
        keys += there - indexed + min(read.count_at(layer), indexed)
    return keys, num_layers * there


@dataclass(eq=False)
class DocumentUse:
    """A document at position ``start``, computed at ``encoded_at``.

    ``seconds`` is the time until its keys and values were ready. It counts from ``begun``: the
    admission, or the first step that computes the document here. ``tier`` is the tier that loads
    it. ``fell_back`` marks a document that is computed because its load failed. ``primer`` is read
    between the context and the document when it is computed."""

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
    primer: "DocumentUse | None" = None

    @property
    def encoded_at(self) -> int:
        """The position of the first token when it is computed: after the context and the primer."""
        return self.part.context_length + (self.primer.num_tokens if self.primer else 0)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.part.tokens

    @property
    def num_tokens(self) -> int:
        return len(self.part.tokens)

    @property
    def write_pages(self) -> tuple[int, ...]:
        """The pages of new keys and values."""
        return self._held().pages

    def position(self, index: int) -> int:
        """The position at which the token at ``index`` is computed."""
        return self.encoded_at + index

    def span(self) -> ReadSpan:
        """The whole document at its position in this sequence."""
        segment = self._held()
        return ReadSpan(segment.pages, self.start, segment.length, len(segment.pages))

    def _held(self) -> Segment:
        assert self.segment is not None, "a document is read or written only while admitted"
        return self.segment


def reads_apart(request: Request) -> bool:
    """Whether a request uses APE and has a document with tokens."""
    fuse = request.fuse
    return (
        fuse is not None
        and fuse.selector == "ape"
        and any(isinstance(part, DocumentPart) and part.tokens for part in request.parts)
    )


def starts_of(parts: Sequence[TextPart | DocumentPart], *, together: bool) -> list[int]:
    """The position of each part's first token; ``together`` gives all documents the same start."""
    starts, position, longest = [], 0, 0
    for part in parts:
        if together and isinstance(part, DocumentPart):
            starts.append(position)
            longest = max(longest, len(part.tokens))
            continue
        starts.append(position + longest)
        position, longest = position + longest + len(part.tokens), 0
    return starts


def require_apart(request: Request, model: ModelConfig) -> None:
    """Raises InvalidOption if the request or the model does not permit APE."""
    fuse = request.fuse
    if not reads_apart(request) or fuse is None:
        return
    kinds = [isinstance(part, DocumentPart) for part in request.parts]
    if sum(before and not after for before, after in pairwise(kinds)) > 1:
        raise InvalidOption(
            "fuse 'ape' gives all documents the same position, so no text can be "
            "between two of them: put it before the first or after the last"
        )
    if request.select is not None and request.select.policy != "all":
        raise InvalidOption(
            "fuse 'ape' scales the attention to all documents, and select reads only a part of "
            "their pages: leave one of these options out"
        )
    if model.soft_cap:
        raise InvalidOption(
            "fuse 'ape' changes the temperature of scores, which this model caps: use another "
            "selector"
        )
