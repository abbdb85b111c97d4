"""The summary of documents that an engine holds, for the routers of a fleet.

It has tags instead of segment keys, because a router has no tokens. Only documents in the pool or
in host memory count; a slower tier is as near to other replicas as to this one."""

import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.store import SegmentStore
from looseleaf.router.tags import registered_tag
from looseleaf.tiers.stores.host import HostTier

if TYPE_CHECKING:
    from looseleaf.engine.sequence import Sequence

MOST_DOCUMENTS = 4096
"""Documents of a summary; the latest used ones are kept."""


@dataclass(frozen=True)
class HeldDocuments:
    """Tokens of the held documents by tag, and the load of the engine.

    ``version`` changes with ``documents``, and with a restart of the engine. ``available`` of its
    ``pages`` are free or evictable."""

    version: str
    documents: dict[str, int]
    running: int
    waiting: int
    pages: int
    available: int


@dataclass(eq=False)
class Holdings:
    """The tags of the latest documents of requests, and those of ``registered`` documents.

    ``registered`` returns ids with a segment key and a length each. Not thread-safe."""

    store: SegmentStore
    registered: Callable[[], Iterable[tuple[str, SegmentKey, int]]]
    host: HostTier | None = None
    most: int = MOST_DOCUMENTS
    _tags: "OrderedDict[str, tuple[SegmentKey, int]]" = field(default_factory=OrderedDict)
    _engine_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    _changes: int = 0
    _documents: dict[str, int] = field(default_factory=dict)

    def note(self, sequence: "Sequence") -> None:
        """Remember the tags of a request's documents."""
        for use in sequence.documents:
            if use.part.tag:
                self._tags[use.part.tag] = use.key, len(use.part.tokens)
                self._tags.move_to_end(use.part.tag)
        while len(self._tags) > self.most:
            self._tags.popitem(last=False)

    def summary(self, running: int, waiting: int) -> HeldDocuments:
        """The current summary, of at most ``most`` documents."""
        documents: dict[str, int] = {}
        for tag, (key, length) in reversed(self._tags.items()):
            if self._holds(key):
                documents[tag] = length
        for document_id, key, length in self.registered():
            if len(documents) >= self.most:
                break
            if self._holds(key):
                documents[registered_tag(document_id)] = length
        if documents != self._documents:
            self._documents, self._changes = documents, self._changes + 1
        return HeldDocuments(
            version=f"{self._engine_id}.{self._changes}",
            documents=documents,
            running=running,
            waiting=waiting,
            pages=self.store.pool.num_pages,
            available=self.store.num_available,
        )

    def _holds(self, key: SegmentKey) -> bool:
        segment = self.store.find(key)
        if segment is not None:
            return segment.ready
        return self.host is not None and self.host.contains([key])[0]
