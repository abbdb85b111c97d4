"""A registered document: its text, its computations, its counters and its public report.

*Evicted keys* are contexts of documents that were evicted from the pool. A tier may still store
them, and deleting the document must delete them too. Keys that no tier has are dropped from time to
time, because a document may have ever more contexts."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from looseleaf.engine.documents.host_prefill import HostingJob
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.reports.outputs import DocumentSource
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import LooseleafError, as_looseleaf_error
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.prompt.request import Document, PromptParts
from looseleaf.tiers import Tiers

_FEW = 256


@dataclass(eq=False)
class EvictedSegmentKeys:
    """Evicted keys by the content key of their document."""

    tiers: Tiers | None
    _keys: dict[SegmentKey, set[SegmentKey]] = field(default_factory=dict)
    # number of keys of a content at which the tiers are searched next
    _most: dict[SegmentKey, int] = field(default_factory=dict)

    def add(self, content: SegmentKey, key: SegmentKey) -> None:
        """Add a context that was evicted from the pool."""
        if self.tiers is None:
            return
        keys = self._keys.setdefault(content, set())
        keys.add(key)
        if len(keys) > self._most.get(content, _FEW):
            self._drop_gone(self.tiers, keys)
            self._most[content] = max(_FEW, 2 * len(keys))

    def discard(self, content: SegmentKey, key: SegmentKey) -> None:
        """Remove a context that is in the pool again."""
        self._keys.get(content, set()).discard(key)

    def take(self, content: SegmentKey) -> set[SegmentKey]:
        """Remove and return all keys of a content."""
        self._most.pop(content, None)
        return self._keys.pop(content, set())

    def _drop_gone(self, tiers: Tiers, keys: set[SegmentKey]) -> None:
        gone = keys - tiers.find(list(keys)).keys()
        # a tier that timed out may still have them, so they are deleted there too
        if gone:
            tiers.delete(list(gone))
        keys -= gone


DocumentState = Literal["computing", "ready", "evicted"]


@dataclass(frozen=True)
class DocumentInfo:
    """A registered document at one moment.

    ``tokens_done`` of its ``num_tokens`` are in the cache, for the context that has fewest. Pages
    and bytes are those held now. ``hits`` counts requests that found it there or on its way,
    ``computed`` how often it had to be computed. ``created`` is in seconds since 1970; ``seconds``
    is how long it took the last time it was computed ahead, None before; of a ``hosted`` one, which
    has no pages, until its index was there. ``stored`` is whether a tier that outlives the process
    had it for all contexts when it became ready; None without such a tier, and until that is known.
    """

    id: str
    name: str | None
    num_tokens: int
    tokens_done: int
    state: DocumentState
    num_pages: int
    num_bytes: int
    pinned: bool
    references: int
    hits: int
    computed: int
    created: float
    seconds: float | None
    hosted: bool = False
    stored: bool | None = None


@dataclass(eq=False)
class Registered:
    """A registered document with its segments by key, one for each context.

    ``ahead`` are the contexts of its registrations, ``others`` the contexts that requests used.
    ``warming`` are the requests that compute it, ``error`` is the error of the latest one.
    ``hostings`` are its jobs for host memory, the latest last. ``stored`` is, by context, whether a
    tier has it."""

    id: str
    salt: str
    document: Document
    content: SegmentKey
    pinned: bool = False
    hits: int = 0
    computed: int = 0
    created: float = field(default_factory=time.time)
    seconds: float | None = None
    error: LooseleafError | None = None
    hostings: dict[SegmentKey, HostingJob] = field(default_factory=dict)
    ahead: dict[SegmentKey, PromptParts] = field(default_factory=dict)
    others: set[SegmentKey] = field(default_factory=set)
    warming: dict[SegmentKey, RequestProgress] = field(default_factory=dict)
    stored: dict[SegmentKey, bool] = field(default_factory=dict)

    @property
    def hosting(self) -> HostingJob | None:
        """The latest job for host memory; None without one."""
        return next(reversed(self.hostings.values()), None)

    def host(self, job: HostingJob) -> None:
        """Add ``job``; counts and replaces an earlier job with the same context."""
        known = self.hostings.pop(job.segment.key, None)
        if known is not None and known is not job and known.seconds is not None:
            self.computed, self.seconds = self.computed + 1, known.seconds
        self.hostings[job.segment.key] = job

    def is_stored(self, hostings: Iterable[HostingJob]) -> bool | None:
        """Whether a tier has all contexts and the disk all ``hostings``; None if any is unknown or
        there are none."""
        stored = [*map(self.stored.get, self.ahead), *(job.stored for job in hostings)]
        return None if None in stored or not stored else all(stored)

    @property
    def failure(self) -> LooseleafError | None:
        """The error of the latest computation ahead; None if it succeeded."""
        if self.hosting is not None and self.hosting.error is not None:
            return as_looseleaf_error(self.hosting.error)
        return self.error

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.document.token_ids or ()


def content_key(keys: KeySpace, tokens: tuple[int, ...] | npt.NDArray[np.int32]) -> SegmentKey:
    """The key of a document's content, independent of its contexts."""
    return keys.document(keys.root, tokens)


def count_source(entries: Iterable[Registered], sequence: Sequence, source: DocumentSource) -> None:
    """Count the source of a document under each of its ids."""
    for entry in entries:
        if source == "computed":
            entry.computed += 1
        elif not sequence.warms:
            entry.hits += 1
