"""Admission: a sequence reserves all pages of its prompt before it runs, and releases them
together.

A document that several sequences wait for is one unfinished segment. One owner computes it. If the
owner ends, another waiting sequence becomes the owner."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from looseleaf.engine.kv_events import KvEvents
from looseleaf.engine.reports.outputs import DocumentReuse, DocumentSource, ReuseReport
from looseleaf.engine.sequence import Phase, Sequence
from looseleaf.engine.tiering.tiering import Tiering
from looseleaf.errors import PoolTooSmall
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.kv.store import Segment, SegmentStore
from looseleaf.prompt.placements import DocumentUse, HostedUse, TextRun


@dataclass
class Admission:
    """Reserves and releases pages of sequences, and publishes full text pages."""

    store: SegmentStore
    keys: KeySpace
    prefix_caching: bool
    tiering: Tiering
    events: KvEvents | None = None
    # full prompt pages that an admitted sequence is about to compute
    _in_flight: dict[SegmentKey, Sequence] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        return self.store.pool.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens``."""
        return -(-num_tokens // self.page_size)

    def pages_needed(self, sequence: Sequence, num_new_tokens: int) -> int:
        """Pages of the sequence's documents, text and ``num_new_tokens`` without any reuse."""
        uses = [*sequence.documents, *sequence.others]
        uses += [use.primer for use in uses if use.primer is not None]
        documents = {use.key: use.num_tokens for use in uses}
        total = sum(self.pages_for(n) for n in documents.values())
        total += sum(self.pages_for(run.num_tokens) for run in sequence.runs[:-1])
        total += sequence.fusion.num_pages if sequence.fusion else 0
        return total + self.pages_for(sequence.tail.num_tokens + num_new_tokens)

    def awaits_prefix(self, sequence: Sequence) -> bool:
        """Whether other sequences compute prefix pages that this one can reuse.

        The sequence then waits until the last of them is published. `still_awaits` repeats the
        check at low cost."""
        return any(self._awaits(sequence, run) for run in sequence.runs)

    def still_awaits(self, sequence: Sequence) -> bool:
        """Whether a page that `awaits_prefix` found is still being computed."""
        return any(run.awaits in self._in_flight for run in sequence.runs)

    def _awaits(self, sequence: Sequence, run: TextRun) -> bool:
        run.awaits = None
        for page in range(len(self._hit_pages(sequence, run)), self._reusable_pages(sequence, run)):
            key = run.page_key(page, sequence.keys, self.page_size)
            if key not in self._in_flight:
                break
            run.awaits = key
        return run.awaits is not None

    def pinned_pages_beside(self, sequence: Sequence) -> int:
        """Pages of pinned segments that ``sequence`` does not read, so it can never use them."""
        store = self.store
        if not store.pinned_pages:
            return 0
        read = [store.find(use.key) for use in sequence.documents]
        read += [segment for run in sequence.runs for segment in self._hit_pages(sequence, run)]
        own = {id(s): len(s.pages) for s in read if s is not None and s.pinned}
        return store.pinned_pages - sum(own.values())

    def admit(self, sequence: Sequence) -> ReuseReport | None:
        """Reserve all pages for the prompt and its next token.

        Returns None, and reserves nothing, if the pool has too few pages. After an error the caller
        releases the sequence."""
        sources = self._acquire_documents(sequence)
        hits = {id(run): self._hit_pages(sequence, run) for run in sequence.runs}
        acquired, pages = list[tuple[TextRun, Segment]](), iter(list[int]())
        try:
            for run in sequence.runs:
                for segment in hits[id(run)]:
                    acquired.append((run, self.store.acquire(segment)))
            # the first use of a repeated document computes it
            uses = reversed(sequence.uses)
            missing = {use.key: use for use in uses if use.segment is None}
            needs = [self.pages_for(use.num_tokens) for use in missing.values()]
            needs += [self._run_pages(sequence, run) - len(hits[id(run)]) for run in sequence.runs]
            needs += [sequence.fusion.num_pages] if sequence.fusion else []
            reserved = self.store.reserve(sum(needs))
            if reserved is None:
                self._release_hits(acquired)
                self._release_documents(sequence)
                return None
            pages = iter(reserved)
            self._own_missing(sequence, missing, pages)
            for run in sequence.runs:
                self._fill_run(run, hits[id(run)], pages, self._run_pages(sequence, run))
                self._announce(sequence, run)
            if sequence.fusion is not None:
                sequence.fusion.pages = list(islice(pages, sequence.fusion.num_pages))
            # after the runs, because the load controller reads their computed tokens
            if missing:
                self._load_missing(sequence, missing, sources)
        except BaseException:
            # the caller releases only pages that the sequence already owns
            self.store.pool.free(list(pages))
            self._release_hits([(run, segment) for run, segment in acquired if not run.pages])
            raise
        sequence.phase = Phase.PREFILL
        return self._report(sequence, sources)

    def _release_hits(self, hits: list[tuple[TextRun, Segment]]) -> None:
        for _, segment in reversed(hits):
            self.store.release(segment)

    def grow(self, sequence: Sequence) -> bool:
        """Reserve a page for the tail's newest token if needed; False if the pool has none."""
        if sequence.has_room:
            return True
        tail = sequence.tail
        page = self.store.reserve_next(tail.pages[-1])
        if page is None:
            return False
        tail.pages += page
        tail.segments.append(None)
        return True

    def publish(self, sequence: Sequence, run: TextRun) -> None:
        """Insert the run's full pages into the store, unless it has the same pages already."""
        if not self.prefix_caching or run.fused:
            return
        exact = sequence.num_exact(run)
        for page in range(run.num_shared_pages(), exact // self.page_size):
            key = run.page_key(page, sequence.keys, self.page_size)
            self._land(sequence, key)
            if run.segments[page] is None and self.store.find(key) is None:
                run.segments[page] = self.store.insert(
                    key, self.page_size, [run.pages[page]], ready=True
                )
        # a later run follows documents, which have no place in a chain of prefixes
        if self.events is not None and run.start == 0 and sequence.keys is self.keys:
            self._tell_stored(sequence, run, exact // self.page_size, self.events)

    def _tell_stored(
        self, sequence: Sequence, run: TextRun, num_pages: int, events: KvEvents
    ) -> None:
        size, parent = self.page_size, None
        for page, key in enumerate(run.page_keys(num_pages, sequence.keys, size)):
            if self.store.find(key) is None:
                return
            events.stored(key, parent, run.tokens[page * size : (page + 1) * size])
            parent = key

    def release(self, sequence: Sequence) -> list[Segment]:
        """Release all pages of ``sequence``; returns unfinished documents without an owner."""
        for key in [k for k, s in self._in_flight.items() if s is sequence]:
            del self._in_flight[key]
        # last pages first, so that eviction takes them before the pages they depend on
        for run in reversed(sequence.runs):
            for page, segment in zip(reversed(run.pages), reversed(run.segments), strict=True):
                if segment is None:
                    self.store.pool.free([page])
                else:
                    self.store.release(segment)
        if sequence.fusion is not None:
            self.store.pool.free(sequence.fusion.pages)
        owned = [use.segment for use in sequence.owned if use.segment is not None]
        self._release_documents(sequence)
        sequence.reset()
        return [s for s in owned if not s.ready and s.references > 0]

    def adopt(self, sequence: Sequence, segment: Segment) -> bool:
        """Make ``sequence`` the owner of ``segment`` if it waits for it; returns whether it did."""
        for use in sequence.uses:
            if use.segment is segment:
                use.computed = use.scheduled = segment.filled = 0
                sequence.owned.append(use)
                return True
        return False

    def _acquire_documents(self, sequence: Sequence) -> dict[DocumentUse, DocumentSource]:
        sources: dict[DocumentUse, DocumentSource] = {}

        def acquire(use: DocumentUse) -> None:
            segment = self.store.find(use.key)
            if segment is None:
                sources[use] = "computed"
            else:
                use.segment = self.store.acquire(segment)
                sources[use] = "cached" if segment.ready else "awaited"
                self.tiering.note_read(use.key)

        for use in (*sequence.documents, *sequence.others):
            acquire(use)
        sequence.need_primers()
        for primer in sequence.primers:
            acquire(primer)
        return sources

    def _release_documents(self, sequence: Sequence) -> None:
        for use in sequence.uses:
            if use.segment is not None:
                self.store.release(use.segment)
                use.segment = None

    def _own_missing(
        self, sequence: Sequence, missing: dict[SegmentKey, DocumentUse], pages: Iterator[int]
    ) -> None:
        for use in sequence.uses:
            if use.segment is not None:
                continue
            if use is missing[use.key]:
                taken = islice(pages, self.pages_for(use.num_tokens))
                # a document without tokens is ready immediately
                empty = use.num_tokens == 0
                use.segment = self.store.insert(use.key, use.num_tokens, taken, ready=empty)
                sequence.owned += [] if empty else [use]
            else:
                first = missing[use.key].segment
                assert first is not None
                use.segment = self.store.hold(first)

    def pin_prefix(self, sequence: Sequence) -> None:
        """Pin the full pages of a sequence's first run, after it is computed.

        Raises PoolTooSmall, and then pins no page."""
        run, pinned = sequence.runs[0], list[Segment]()
        for page in range(run.computed // self.page_size):
            segment = self.store.find(run.page_key(page, sequence.keys, self.page_size))
            assert segment is not None, "a page that was computed is published"
            pinned += [] if segment.pinned else [segment]
            try:
                self.store.pin(segment)
            except PoolTooSmall:
                for pinned_segment in pinned:
                    self.store.unpin(pinned_segment)
                raise

    def _load_missing(
        self,
        sequence: Sequence,
        missing: dict[SegmentKey, DocumentUse],
        sources: dict[DocumentUse, DocumentSource],
    ) -> None:
        """Start loads of owned documents from the tiers; the sequence then owns only the rest."""
        loads = self.tiering.begin(sequence, missing.values())
        sequence.owned = [use for use in sequence.owned if use.key not in loads]
        for use in sequence.documents:
            if use.key in loads and sources[use] == "computed":
                sources[use] = "loaded"

    def _reusable_pages(self, sequence: Sequence, run: TextRun) -> int:
        """Full pages of a run without the prompt's last token, which is computed for its logits,
        and without scored rows."""
        if run.fused:
            return 0
        # the tail of a warming sequence is empty
        tokens = max(0, run.num_tokens - 1) if run is sequence.tail else run.num_tokens
        if sequence.prompt_logprobs is not None:
            tokens = min(tokens, sequence.prompt_logprobs.num_reusable(run))
        return tokens // self.page_size if self.prefix_caching else 0

    def _hit_pages(self, sequence: Sequence, run: TextRun) -> list[Segment]:
        hits: list[Segment] = []
        count = self._reusable_pages(sequence, run)
        for key in run.page_keys(count, sequence.keys, self.page_size):
            segment = self.store.find(key)
            if segment is None:
                break
            hits.append(segment)
        return hits

    def _run_pages(self, sequence: Sequence, run: TextRun) -> int:
        grows = run is sequence.tail and sequence.draws
        return self.pages_for(run.num_tokens + grows)

    def _fill_run(
        self, run: TextRun, hits: list[Segment], pages: Iterator[int], count: int
    ) -> None:
        own = list(islice(pages, count - len(hits)))
        run.pages = [*(segment.pages[0] for segment in hits), *own]
        run.segments = [*hits, *[None] * len(own)]
        run.computed = run.scheduled = len(hits) * self.page_size

    def _announce(self, sequence: Sequence, run: TextRun) -> None:
        count = min(len(run.segments), self._reusable_pages(sequence, run))
        if count > 0:
            # the last key also computes all earlier ones
            run.page_key(count - 1, sequence.keys, self.page_size)
        for page in range(count):
            if run.segments[page] is None:
                key = run.page_key(page, sequence.keys, self.page_size)
                self._in_flight.setdefault(key, sequence)

    def _land(self, sequence: Sequence, key: SegmentKey) -> None:
        if self._in_flight.get(key) is sequence:
            del self._in_flight[key]

    def _report(
        self, sequence: Sequence, sources: dict[DocumentUse, DocumentSource]
    ) -> ReuseReport:
        first = {use.key: use for use in reversed(sequence.documents)}
        now = time.perf_counter()
        documents = []
        for use in sequence.parts:
            if isinstance(use, HostedUse):
                documents.append(
                    DocumentReuse(
                        use.part.name, use.num_tokens, use.start, "cached", 0.0, hosted=True
                    )
                )
            if not isinstance(use, DocumentUse):
                continue
            source = sources[use]
            # a repeated document is computed or loaded once
            if source in ("computed", "loaded") and first[use.key] is not use:
                source = "cached"
            if use.seconds is None:
                ready = source == "cached" or use.num_tokens == 0
                use.begun, use.seconds = now, 0.0 if ready else None
            documents.append(
                DocumentReuse(use.part.name, use.num_tokens, use.start, source, tier=use.tier)
            )
        return ReuseReport(
            tuple(documents),
            text_tokens=sum(run.num_tokens for run in sequence.runs),
            text_tokens_cached=sum(run.computed for run in sequence.runs),
            fuse=sequence.fuse_in_force,
        )
