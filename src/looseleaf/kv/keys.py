"""Identity of stored keys and values: a hash over everything that determines them.

A segment key covers the model, the RoPE frequencies, the stored dtype, the tenant's salt, the
tokens, and their *context*: the tokens visible to them (docs/documents.md). It excludes the
position, which the frame of the segment replaces. Equal tokens in different contexts are different
segments, so that answers do not depend on the state of the cache."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

SegmentKey = NewType("SegmentKey", bytes)
_DIGEST_BYTES = 32


def _length(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little")


def _framed(kind: bytes, parts: Sequence[bytes]) -> bytes:
    # length prefixes make the encoding of a list of parts unique
    return kind.ljust(16) + b"".join(_length(part) + part for part in parts)


def _digest(kind: bytes, parts: Sequence[bytes]) -> SegmentKey:
    return SegmentKey(hashlib.blake2b(_framed(kind, parts), digest_size=_DIGEST_BYTES).digest())


def _token_bytes(tokens: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    if isinstance(tokens, np.ndarray):
        return tokens.astype("<i4", copy=False).tobytes()
    return struct.pack(f"<{len(tokens)}i", *tokens)


@dataclass(frozen=True)
class KeySpace:
    """All keys of one model, RoPE law, stored dtype and salt.

    ``root`` is the empty context. ``shared_root`` is the root without a request's salt, for text
    that belongs to no request.
    """

    root: SegmentKey
    shared_root: SegmentKey

    @classmethod
    def create(
        cls, *, model: bytes, rope: bytes, kv_dtype: str, salt: str, page_size: int
    ) -> "KeySpace":
        """The key space of a configuration; it includes ``page_size``, because text is stored in
        pages.
        """
        root = _digest(
            b"root", [model, rope, kv_dtype.encode(), salt.encode(), str(page_size).encode()]
        )
        return cls(root, root)

    def salted(self, salt: str) -> "KeySpace":
        """The key space of a request's salt; ``self`` for an empty salt.

        Key spaces of different salts have only shared pages in common.
        """
        if not salt:
            return self
        return KeySpace(_digest(b"salted", [self.root, salt.encode()]), self.shared_root)

    def document(
        self, context: SegmentKey, tokens: Sequence[int] | npt.NDArray[np.int32]
    ) -> SegmentKey:
        """The key of a document encoded after ``context``."""
        return _digest(b"document", [self.root, context, _token_bytes(tokens)])

    def text_page(self, context: SegmentKey, tokens: Sequence[int]) -> SegmentKey:
        """The key of a full page of text; ``context`` is the chain of everything before it."""
        return _digest(b"text page", [self.root, context, _token_bytes(tokens)])

    def shared_page(self, context: SegmentKey, tokens: Sequence[int]) -> SegmentKey:
        """The key of a full page of the service's own text, equal under all requests' salts."""
        return _digest(b"text page", [self.shared_root, context, _token_bytes(tokens)])

    def text_pages(
        self, context: SegmentKey, tokens: Sequence[int], page_size: int, *, shared: bool = False
    ) -> list[SegmentKey]:
        """The chained keys of all full pages of ``tokens``, equal to repeated `text_page` or
        `shared_page`.
        """
        root = self.shared_root if shared else self.root
        # the common prefix is encoded once, because a long prompt has a thousand pages
        head = _framed(b"text page", [root]) + _length(context)
        middle, data = _length(bytes(4 * page_size)), _token_bytes(tokens)
        keys, step = [], 4 * page_size
        for start in range(0, len(data) - step + 1, step):
            page = data[start : start + step]
            state = hashlib.blake2b(head + context + middle + page, digest_size=_DIGEST_BYTES)
            context = SegmentKey(state.digest())
            keys.append(context)
        return keys

    def text_end(self, context: SegmentKey, tokens: Sequence[int]) -> SegmentKey:
        """The chain after a text whose last, partly filled page contains ``tokens``."""
        return _digest(b"text end", [self.root, context, _token_bytes(tokens)])

    def placed(self, context: SegmentKey, document: SegmentKey, policy: bytes = b"") -> SegmentKey:
        """The chain after ``document``, placed after ``context`` under a fuse ``policy``."""
        return _digest(b"placed", [self.root, context, document, policy])
