"""The registered documents that an API process used last."""

import sys
from collections import OrderedDict
from typing import Any, NamedTuple

from looseleaf.prompt.request import Document

# memory of a token id: a Python integer and its reference in a tuple
_ID_BYTES = 36
Key = tuple[str, str]


class _Entry(NamedTuple):
    edition: Any
    document: Document
    num_bytes: int


class RegisteredCache:
    """The latest registered documents and their editions, by id and salt.

    A prompt then needs no copy of the text from the engine. The cache holds at most ``num_bytes``,
    and always the latest document. It may hold documents that another process has deleted, so
    every use needs a confirmation of the engine."""

    def __init__(self, num_bytes: int = 1 << 28) -> None:
        self._room = num_bytes
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()

    def get(self, key: Key) -> tuple[Any, Document | None]:
        """The edition and the document of a key; None for both if the cache lacks it."""
        entry = self._entries.get(key)
        if entry is None:
            return None, None
        self._entries.move_to_end(key)
        return entry.edition, entry.document

    def put(self, key: Key, edition: Any, document: Document) -> None:
        """Add or replace a document, and drop the oldest ones above the limit."""
        self.drop(key)
        entry = self._entries[key] = _Entry(edition, document, _num_bytes(document))
        self._room -= entry.num_bytes
        while self._room < 0 and len(self._entries) > 1:
            self.drop(next(iter(self._entries)))

    def drop(self, key: Key) -> None:
        """Drop a document, if the cache has it."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._room += entry.num_bytes

    def clear(self) -> None:
        """Drop all documents."""
        for key in [*self._entries]:
            self.drop(key)


def _num_bytes(document: Document) -> int:
    return sum(map(sys.getsizeof, document.texts)) + _ID_BYTES * len(document.token_ids or ())
