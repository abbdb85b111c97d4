"""One registered document: its text, what computes or hosts it, and what has been counted of it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from looseleaf.engine.hosted_pass import HostingJob
from looseleaf.engine.outputs import DocumentSource
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.request import Document, PromptParts
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import LooseleafError, as_looseleaf_error
from looseleaf.kv.keys import KeySpace, SegmentKey


@dataclass(eq=False)
class Registered:
    """A registered document with the segments it has, by key: one for each context.

    ``ahead`` are the contexts that it is registered for, ``warming`` the requests that compute it,
    ``error`` why the latest of these failed, if it did; ``hosting`` what hosts it outside of the
    pool, if it is hosted.
    """

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
    hosting: HostingJob | None = None
    ahead: dict[SegmentKey, PromptParts] = field(default_factory=dict)
    others: set[SegmentKey] = field(default_factory=set)
    warming: dict[SegmentKey, RequestProgress] = field(default_factory=dict)

    @property
    def failure(self) -> LooseleafError | None:
        """Why the latest computation ahead failed, None if it did not."""
        if self.hosting is not None and self.hosting.error is not None:
            return as_looseleaf_error(self.hosting.error)
        return self.error

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.document.token_ids or ()


def content_key(keys: KeySpace, tokens: tuple[int, ...] | npt.NDArray[np.int32]) -> SegmentKey:
    """What a document is apart from its contexts."""
    return keys.document(keys.root, tokens)


def count_source(entries: Iterable[Registered], sequence: Sequence, source: DocumentSource) -> None:
    """Count where a document came from under every id that it has."""
    for entry in entries:
        if source == "computed":
            entry.computed += 1
        elif not sequence.warms:
            entry.hits += 1
