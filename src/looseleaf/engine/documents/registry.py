"""The registry of documents: ids, texts, tokens and the state of their segments.

Registration computes a document's segment before any request reads it. The cache may evict the
segment unless it is pinned; the next request that needs it computes it again. A document belongs to
a salt. Requests with another salt can't see, use or delete it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import dropwhile, islice

from looseleaf.config import IndexConfig
from looseleaf.config.option import require_text
from looseleaf.engine.documents.entry import (
    DocumentInfo,
    EvictedSegmentKeys,
    Registered,
    content_key,
    count_source,
)
from looseleaf.engine.documents.hosting import Hosting
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.reports.outputs import DocumentSource, ReuseReport
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import (
    DocumentExists,
    DocumentNotFound,
    InvalidRequest,
    LooseleafError,
    PoolTooSmall,
    TooManyDocuments,
)
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.kv.store import Segment, SegmentStore
from looseleaf.parallel import Ranks
from looseleaf.parallel.ranks import command
from looseleaf.prompt.placements import DocumentUse
from looseleaf.prompt.request import Document, DocumentPart, PromptParts
from looseleaf.tiers import Tiers

Warm = Callable[[PromptParts, str, Callable[[RequestProgress], None]], RequestProgress]


@dataclass(eq=False)
class Documents:
    """All registered documents of an engine.

    ``warm`` starts the computation of a prompt ahead of requests and calls back at its end;
    ``cancel`` stops it. Pins and deletions also apply to the ``tiers``. Only `get` and `edition`
    may be called from any thread."""

    store: SegmentStore
    keys: KeySpace
    warm: Warm
    cancel: Callable[[str], None]
    tiers: Tiers | None = None
    hosting: Hosting | None = None
    # by salt, then by id: the lookups of a salt take no time that depends on other salts
    _entries: dict[str, dict[str, Registered]] = field(default_factory=dict)
    _by_key: dict[SegmentKey, list[Registered]] = field(default_factory=dict)
    _by_content: dict[SegmentKey, list[Registered]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._evicted_keys = EvictedSegmentKeys(self.tiers)

    @property
    def ranks(self) -> Ranks | None:
        """The ranks of the engine, which have the same documents."""
        return None if self.hosting is None else self.hosting.ranks

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @command("documents.register")
    def register(
        self,
        document: Document,
        parts: PromptParts,
        document_id: str | None = None,
        salt: str = "",
        *,
        pinned: bool = False,
        hosted: IndexConfig | None = None,
        most: int | None = None,
    ) -> DocumentInfo:
        """Keep ``document`` under an id, and start to compute ``parts``: into the pool, or into
        host memory with the index ``hosted``.

        ``parts`` come from `PromptBuilder.from_document`. The default id depends on content and
        salt. Another registration of the same text may only add a context or a pin. ``most`` is the
        limit of documents of a salt.

        Raises DocumentExists if the id has another text; a failed registration without segments is
        replaced instead. Raises TooManyDocuments, and PoolTooSmall if the pool has no room.
        """
        if document_id is not None:
            require_text("document_id", document_id)
        tokens = next(part.tokens for part in parts if isinstance(part, DocumentPart))
        content = content_key(self.keys.salted(salt), tokens)
        name = f"doc-{content.hex()[:24]}" if document_id is None else document_id
        entry = self._entries.get(salt, {}).get(name)
        if entry is not None and self._failed(entry):
            entry = self._given_back(entry, content)
        fresh = entry is None
        if entry is None:
            self._check_number(salt, most)
            entry = Registered(name, salt, replace(document, token_ids=tokens), content)
        elif entry.content != content:
            raise DocumentExists(
                f"document id {name!r} is in use for another text: delete that, or choose "
                "another id"
            )
        if hosted is not None:
            assert self.hosting is not None, "an engine has a place for hosted documents"
            if pinned:
                raise InvalidRequest("a hosted document has no pages to pin: drop pinned or hosted")
            entry.host(self.hosting.add(parts, salt, hosted, beside=True))
        else:
            if pinned or entry.pinned:
                self._check_pins(entry, parts)
            self._begin(entry, parts)
        entry.pinned = pinned or entry.pinned
        if fresh:
            self._entries.setdefault(salt, {})[name] = entry
            self._by_content.setdefault(content, []).append(entry)
        self._pin_ready(entry)
        return self._info(entry)

    def get(self, document_id: str, salt: str = "") -> Document:
        """The document as registered, for use in prompts. Raises DocumentNotFound."""
        return self._entry(document_id, salt).document

    def segment_keys(self) -> Iterator[tuple[str, SegmentKey, int]]:
        """Ids of documents with the key of each context and their tokens."""
        for entries in self._entries.values():
            for entry in entries.values():
                for key in (*entry.ahead, *entry.others):
                    yield entry.id, key, len(entry.tokens)

    def edition(self, document_id: str, salt: str = "") -> tuple[str, float]:
        """The content and the time of a registration; another document has another edition.

        Callable from any thread. Raises DocumentNotFound."""
        entry = self._entry(document_id, salt)
        return entry.content.hex(), entry.created

    def all(
        self, salt: str = "", *, after: str | None = None, limit: int | None = None
    ) -> list[DocumentInfo]:
        """At most ``limit`` documents of a salt, oldest first, registered later than ``after``.

        Raises DocumentNotFound if ``after`` is not registered."""
        entries = iter(self._entries.get(salt, {}).values())
        if after is not None:
            last = self._entry(after, salt)
            entries = islice(dropwhile(lambda entry: entry is not last, entries), 1, None)
        return [self._info(entry) for entry in islice(entries, limit)]

    def stat(self, document_id: str, salt: str = "") -> DocumentInfo:
        """One document. Raises DocumentNotFound."""
        return self._info(self._entry(document_id, salt))

    def failure(self, document_id: str, salt: str = "") -> LooseleafError | None:
        """The error of the latest computation ahead; None if it succeeded. The document remains
        until another document is registered under its id."""
        return self._entry(document_id, salt).failure

    @command("documents.pin")
    def pin(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Keep a document's segments in the cache; evicted segments are computed again.

        Raises PoolTooSmall if pinned documents would take more than half of the pool, and
        InvalidRequest if the whole document is hosted."""
        entry = self._entry(document_id, salt)
        if entry.hostings and not entry.ahead:
            raise InvalidRequest(
                f"document {document_id!r} is hosted and has no pages to pin: it stays as it is "
                "until it is deleted"
            )
        self._check_pins(entry)
        for parts in list(entry.ahead.values()):
            self._begin(entry, parts)
        entry.pinned = True
        self._pin_ready(entry)
        return self._info(entry)

    @command("documents.unpin")
    def unpin(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Allow the eviction of a document's segments again."""
        entry = self._entry(document_id, salt)
        entry.pinned = False
        for key in entry.ahead:
            if any(e.pinned for e in self._by_key[key]):
                continue
            segment = self.store.find(key)
            if segment is not None:
                self.store.unpin(segment)
            if self.tiers is not None:
                self.tiers.pin(key, False)
        return self._info(entry)

    @command("documents.delete")
    def delete(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Delete a document; returns its last state.

        Its pages become free immediately, or at the end of the requests that read them. They remain
        if the same text is registered under another id."""
        info = self.stat(document_id, salt)
        self.unpin(document_id, salt)
        entry = self._entries[salt].pop(document_id)
        if not self._entries[salt]:
            del self._entries[salt]
        for progress in list(entry.warming.values()):
            self.cancel(progress.request.request_id)
        self._unhost(entry)
        gone: set[SegmentKey] = set()
        self._by_content[entry.content].remove(entry)
        if not self._by_content[entry.content]:
            del self._by_content[entry.content]
            gone |= self._evicted_keys.take(entry.content)
        for key in [*entry.ahead, *entry.others]:
            self._detach(entry, key)
            segment = self.store.find(key)
            if key not in self._by_key:
                gone.add(key)
                if segment is not None:
                    self.store.forget(segment)
        if self.tiers is not None and gone:
            self.tiers.delete(list(gone))
        return info

    def note_admission(self, sequence: Sequence, report: ReuseReport) -> None:
        """Count the sources of the registered documents of an admitted sequence. `note_arrival`
        counts documents that load from tiers."""
        if not self._entries:
            return
        counted: set[SegmentKey] = set()
        for hosted in sequence.hosted:
            content = content_key(sequence.keys, hosted.part.ids)
            for entry in self._by_content.get(content, ()):
                entry.hits += 1
        pooled = [reuse for reuse in report.documents if not reuse.hosted]
        for use, reuse in zip(sequence.documents, pooled, strict=True):
            if use.key in counted:
                continue
            counted.add(use.key)
            entries = self._by_content.get(content_key(sequence.keys, use.part.ids), ())
            for entry in entries:
                self._attach(entry, use.key)
            if reuse.source != "loaded":
                count_source(entries, sequence, reuse.source)

    def note_arrival(self, sequence: Sequence, use: DocumentUse, source: DocumentSource) -> None:
        """Count the final source of a document whose load has ended, if it is registered."""
        if self._entries:
            content = content_key(sequence.keys, use.part.ids)
            count_source(self._by_content.get(content, ()), sequence, source)

    def _check_number(self, salt: str, most: int | None) -> None:
        number = len(self._entries.get(salt, {}))
        if most is not None and number >= most:
            raise TooManyDocuments(
                f"{number} documents are registered, but {most} are the most: delete some"
            )

    def _entry(self, document_id: str, salt: str) -> Registered:
        entry = self._entries.get(salt, {}).get(document_id)
        if entry is None:
            raise DocumentNotFound(
                f"no document {document_id!r} is registered: register it, or check its id"
            )
        return entry

    def _begin(self, entry: Registered, parts: PromptParts) -> None:
        """Compute the segment of ``parts`` unless it is ready or in progress."""
        known = next((key for key, p in entry.ahead.items() if p == parts), None)
        if known is not None:
            segment = self.store.find(known)
            ready = segment is not None and segment.ready
            if ready:
                self._ask_stored(entry, known)
            if ready or known in entry.warming:
                return

        def ended(progress: RequestProgress) -> None:
            self._ended(entry, progress)

        progress = self.warm(parts, entry.salt, ended)
        entry.error = None
        (use,) = progress.outputs[0].sequence.documents
        entry.ahead[use.key] = parts
        entry.stored.pop(use.key, None)
        # a chat may have computed this context before
        entry.others.discard(use.key)
        entry.warming[use.key] = progress
        self._attach(entry, use.key)

    def _failed(self, entry: Registered) -> bool:
        """Whether a registration failed and the document has no segment, ready or in progress."""
        if entry.failure is None or entry.warming:
            return False
        hosted = any(job.error is None for job in entry.hostings.values())
        return not hosted and not any(segment.ready for segment in self._segments(entry))

    def _given_back(self, entry: Registered, content: SegmentKey) -> Registered | None:
        """A failed registration, reset for another attempt; None if ``content`` differs."""
        if entry.content != content:
            self.delete(entry.id, entry.salt)
            return None
        # the next attempt uses finished parts of the index
        for key in entry.ahead:
            self._detach(entry, key)
            self._evicted_keys.add(content, key)
        entry.ahead, entry.error, entry.hostings, entry.stored = {}, None, {}, {}
        return entry

    def _ended(self, entry: Registered, progress: RequestProgress) -> None:
        (use,) = progress.outputs[0].sequence.documents
        entry.warming.pop(use.key, None)
        entry.error = progress.error
        if progress.error is None and use.seconds:
            entry.seconds = use.seconds
        if entry.id in self._entries.get(entry.salt, {}):
            if progress.error is None:
                self._ask_stored(entry, use.key)
            self._pin_ready(entry)

    def _ask_stored(self, entry: Registered, key: SegmentKey) -> None:
        """Record whether a tier has a context, after all pending writes to it."""
        if self.tiers is not None:
            self.tiers.look_up(key, lambda stored: entry.stored.update({key: stored}))

    def _unhost(self, entry: Registered) -> None:
        """Drop the host memory of a deleted document, unless another id has the same text."""
        for key in entry.hostings:
            entries = self._entries.get(entry.salt, {}).values()
            if self.hosting and not any(key in e.hostings for e in entries):
                self.hosting.forget(key)

    def _attach(self, entry: Registered, key: SegmentKey) -> None:
        segment = self.store.find(key)
        if segment is not None:
            segment.forgotten = False
        holders = self._by_key.setdefault(key, [])
        if entry in holders:
            return
        holders.append(entry)
        self._evicted_keys.discard(entry.content, key)
        if key not in entry.ahead:
            for old in [k for k in entry.others if self.store.find(k) is None]:
                entry.others.remove(old)
                self._detach(entry, old)
                self._evicted_keys.add(entry.content, old)
            entry.others.add(key)

    def _detach(self, entry: Registered, key: SegmentKey) -> None:
        self._by_key[key].remove(entry)
        if not self._by_key[key]:
            del self._by_key[key]

    def _pin_ready(self, entry: Registered) -> None:
        if entry.pinned:
            for segment in self._segments(entry):
                if segment.ready and segment.key in entry.ahead:
                    self.store.pin(segment)
                    if self.tiers is not None:
                        self.tiers.pin(segment.key, True)

    def _check_pins(self, entry: Registered, parts: PromptParts | None = None) -> None:
        contexts = [*entry.ahead.values()]
        if parts is not None and parts not in contexts:
            contexts.append(parts)
        every = (e for own in self._entries.values() for e in own.values())
        rivals = [e for e in every if e.pinned and e is not entry]
        pages = sum(len(e.ahead) * self._pages_for(len(e.tokens)) for e in rivals)
        pages += len(contexts) * self._pages_for(len(entry.tokens))
        most = self.store.pool.num_pages // 2
        if pages > most:
            # the message omits their number because other tenants may own them
            raise PoolTooSmall(
                f"with this one, pinned documents would take more than half of the pool, {most} "
                "pages, which is the most: unpin another one or enlarge the cache"
            )

    def _segments(self, entry: Registered) -> list[Segment]:
        segments = (self.store.find(key) for key in [*entry.ahead, *entry.others])
        return [segment for segment in segments if segment is not None]

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.store.pool.page_size)

    def _info(self, entry: Registered) -> DocumentInfo:
        segments = self._segments(entry)
        num_tokens = len(entry.tokens)
        progress = [self._done(key, num_tokens) for key in entry.ahead]
        ready = all(n == num_tokens for n in progress)
        pages = sum(len(segment.pages) for segment in segments)
        num_bytes = pages * self.store.pool.bytes_per_page
        hostings = list(entry.hostings.values())
        # read before the jobs' results: a thread may finish a job at any moment
        waiting = entry.warming or not all(job.finished.is_set() for job in hostings)
        durations = [job.seconds for job in hostings if job.seconds is not None]
        num_bytes += sum(job.segment.num_bytes for job in hostings)
        # failed jobs count only if the document has no other segment, ready or in progress
        alive = [job for job in hostings if job.error is None]
        for job in alive or ([] if entry.ahead else hostings):
            progress.append(job.segment.filled)
            ready = ready and job.stage == "ready"
        return DocumentInfo(
            id=entry.id,
            name=entry.document.name,
            num_tokens=num_tokens,
            tokens_done=min(progress, default=0),
            state="computing" if waiting else "ready" if ready else "evicted",
            num_pages=pages,
            num_bytes=num_bytes,
            pinned=entry.pinned,
            references=sum(segment.references for segment in segments),
            hits=entry.hits,
            computed=entry.computed + len(durations),
            created=entry.created,
            seconds=durations[-1] if durations else entry.seconds,
            hosted=bool(hostings),
            stored=entry.is_stored(alive),
        )

    def _done(self, key: SegmentKey, num_tokens: int) -> int:
        segment = self.store.find(key)
        if segment is None:
            return 0
        return num_tokens if segment.ready else segment.filled
