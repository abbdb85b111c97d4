"""Identity of stored keys and values: a hash over what determines them, and nothing else.

A key names the model, the RoPE frequencies, the stored dtype, the tenant's salt, the *context* the
tokens could see when they were encoded, and the tokens (DESIGN §2). It never names a position: that
is the frame's business. Two contents that saw different contexts are different segments, so an
answer can't depend on what happened to be in the cache."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

SegmentKey = NewType("SegmentKey", bytes)
_DIGEST_BYTES = 32


def _digest(kind: bytes, parts: Sequence[bytes]) -> SegmentKey:
    # every part is length-prefixed, so that no two lists of parts read the same
    state = hashlib.blake2b(kind.ljust(16), digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return SegmentKey(state.digest())


def _token_bytes(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


@dataclass(frozen=True)
class KeySpace:
    """All keys of one model, RoPE law, stored dtype and salt; ``root`` is the context of what saw
    nothing.

    ``shared_root`` is the root without a request's salt, for text that belongs to nobody's request.
    """

    root: SegmentKey
    shared_root: SegmentKey

    @classmethod
    def create(
        cls, *, model: bytes, rope: bytes, kv_dtype: str, salt: str, page_size: int
    ) -> "KeySpace":
        """The key space of a configuration. ``page_size`` counts, since text is kept page by
        page.
        """
        root = _digest(
            b"root", [model, rope, kv_dtype.encode(), salt.encode(), str(page_size).encode()]
        )
        return cls(root, root)

    def salted(self, salt: str) -> "KeySpace":
        """The keys of a request with a salt of its own; an empty one changes nothing.

        Two different salts have no key in common but those of shared pages.
        """
        if not salt:
            return self
        return KeySpace(_digest(b"salted", [self.root, salt.encode()]), self.shared_root)

    def document(self, context: SegmentKey, tokens: Sequence[int]) -> SegmentKey:
        """A document encoded behind ``context``."""
        return _digest(b"document", [self.root, context, _token_bytes(tokens)])

    def text_page(self, context: SegmentKey, tokens: Sequence[int]) -> SegmentKey:
        """A full page of text; ``context`` is the chain of everything before it."""
        return _digest(b"text page", [self.root, context, _token_bytes(tokens)])

    def shared_page(self, context: SegmentKey, tokens: Sequence[int]) -> SegmentKey:
        """A full page of the service's own text, the same under every request's salt."""
        return _digest(b"text page", [self.shared_root, context, _token_bytes(tokens)])

    def text_end(self, context: SegmentKey, tokens: Sequence[int]) -> SegmentKey:
        """The chain after a run of text whose last, partly filled page holds ``tokens``."""
        return _digest(b"text end", [self.root, context, _token_bytes(tokens)])

    def placed(self, context: SegmentKey, document: SegmentKey, policy: bytes = b"") -> SegmentKey:
        """The chain after ``document`` was placed behind ``context`` under a fuse ``policy``."""
        return _digest(b"placed", [self.root, context, document, policy])
