"""Registrations of documents, kept to send them again to a replica without the document.

Callers with different keys share nothing."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(eq=False)
class RegisteredBodies:
    """Bodies of registrations by key and id: the latest used ones, of at most ``num_bytes``."""

    num_bytes: int
    _bodies: "OrderedDict[tuple[str, str], bytes]" = field(default_factory=OrderedDict)
    _used: int = 0

    def __len__(self) -> int:
        return len(self._bodies)

    def keep(self, key: str, document_id: str, body: bytes) -> None:
        """Keep the registration of a document; a later one replaces it."""
        self.drop(key, document_id)
        if len(body) > self.num_bytes:
            return
        self._bodies[_name(key, document_id)] = body
        self._used += len(body)
        while self._used > self.num_bytes:
            _, oldest = self._bodies.popitem(last=False)
            self._used -= len(oldest)

    def get(self, key: str, document_id: str) -> bytes | None:
        """The registration of a document; None if it is unknown."""
        name = _name(key, document_id)
        body = self._bodies.get(name)
        if body is not None:
            self._bodies.move_to_end(name)
        return body

    def drop(self, key: str, document_id: str) -> None:
        """Forget a document."""
        self._used -= len(self._bodies.pop(_name(key, document_id), b""))


def _name(key: str, document_id: str) -> tuple[str, str]:
    return hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=16).hexdigest(), document_id
