"""Documents of the latest texts: a text that was seen before costs a hash instead of a tokenizer.

The prompt builder keeps the tokens of each `Document` object. Equal texts of one salt get one
object here. Salts share nothing, so times reveal no text of another tenant."""

import sys
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from looseleaf.prompt.request import Document

_TOKEN_BYTES = 9
"""Bytes of the tokens of one character: a quarter of a Python integer and its place in a tuple."""

_ENTRY_BYTES = 2048
"""Bytes of an entry without its texts."""

Key = tuple[str, str | None, str, str | tuple[str, ...]]
"""Salt, title, context and text."""


class SeenTexts:
    """The documents of at most about ``num_bytes`` of texts and tokens, the latest ones.

    Thread-safe. ``on_hit`` is called for each document that was there."""

    def __init__(
        self, num_bytes: int = 1 << 28, on_hit: Callable[[], object] = lambda: None
    ) -> None:
        self._room, self._on_hit = num_bytes, on_hit
        self._documents: OrderedDict[Key, Document] = OrderedDict()
        self._lock = Lock()

    def document(self, key: Key, make: Callable[[], Document]) -> Document:
        """The document of ``key``, from ``make`` if it is new. Raises the errors of ``make``."""
        with self._lock:
            known = self._documents.get(key)
            if known is not None:
                self._documents.move_to_end(key)
                self._on_hit()
                return known
        document = make()
        with self._lock:
            if self._documents.setdefault(key, document) is document:
                self._room -= _size(key)
                while self._room < 0 and self._documents:
                    oldest, _ = self._documents.popitem(last=False)
                    self._room += _size(oldest)
        return document


def _size(key: Key) -> int:
    texts = (key[3],) if isinstance(key[3], str) else key[3]
    content = sum(2 * sys.getsizeof(text) + _TOKEN_BYTES * len(text) for text in texts)
    return _ENTRY_BYTES + sys.getsizeof(key[1]) + content
