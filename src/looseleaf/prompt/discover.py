"""``reuse="discover"``: texts of a prompt that earlier prompts contained, as documents.

A prompt is cut by its contents (`looseleaf.prompt.cutting`). If enough of its pieces were seen
before, each piece becomes a document behind the prompt's lead, so the engine reads it where it was
computed before, or computes it once. Otherwise the prompt remains text, and its pieces are noted.
The engine sees documents only. Their keys are functions of model, salt, lead and tokens, and of no
other part of any prompt, so no request can put its own context into a piece of another."""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import NamedTuple

from looseleaf.prompt.cutting import Cutter, Piece
from looseleaf.prompt.request import DocumentContent, DocumentPart, PromptParts, TextPart

DISCOVERED = "discovered"
"""The name of discovered documents in reports."""

_BLOCK = 32
"""Tokens per block of the known exact prefixes."""


@dataclass(frozen=True)
class DiscoverLimits:
    """When discovery pays.

    A lead has at most ``max_lead`` tokens; a longer one is shortened to a line end after
    ``min_lead``. Seen pieces must have ``min_seen`` tokens and ``min_share`` of the tokens that no
    exact prefix has. The memory keeps about ``most_tokens`` tokens of pieces."""

    min_lead: int = 16
    max_lead: int = 256
    min_seen: int = 128
    min_share: float = 0.25
    most_tokens: int = 1 << 22


class _Text(NamedTuple):
    """A text part and its pieces that may become documents."""

    part: TextPart
    pieces: list[Piece]


class Discovery:
    """Finds pieces of earlier prompts of the same salt and lead. Thread-safe."""

    def __init__(self, cutter: Cutter, limits: DiscoverLimits | None = None) -> None:
        self._cutter, self._limits = cutter, limits or DiscoverLimits()
        self._seen: OrderedDict[bytes, tuple[int, DocumentContent]] = OrderedDict()
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()
        self._room = self._limits.most_tokens
        self._lock = Lock()

    def apply(self, parts: PromptParts, lead_length: int, salt: str) -> PromptParts:
        """``parts`` with pieces of their texts as documents; ``parts`` itself if that does not pay.

        The tokens remain the same. ``lead_length`` is the length of the context of the prompt's
        documents. The beginning that an earlier exact prompt had remains text, and so does the last
        piece, which is the question."""
        first = parts[0]
        if not isinstance(first, TextPart):
            return parts
        lead = self._lead_length(first.tokens, lead_length)
        root = _digest(salt.encode(), struct.pack(f"<{lead}i", *first.tokens[:lead]))
        chain = list(_chain(_digest(salt.encode()), first.tokens))
        with self._lock:
            exact = max(lead, self._exact_prefix(chain))
        texts = self._texts(parts, lead, exact)
        keyed = [(text, [(_piece_key(root, text, p), p) for p in text.pieces]) for text in texts]
        pieces = [piece for _, own in keyed for piece in own]
        with self._lock:
            seen = sum(piece.num_tokens for key, piece in pieces if key in self._seen)
            contents = {key: self._note(key, piece.num_tokens) for key, piece in pieces}
            rest = sum(len(text.part.tokens) for text in texts) - exact
            pays = seen >= max(self._limits.min_seen, self._limits.min_share * rest)
            if not pays:
                self._note_prefix(chain)
        if not pays:
            return parts
        own_pieces = iter(own for _, own in keyed)
        result: list[TextPart | DocumentPart] = []
        for part in parts:
            if isinstance(part, DocumentPart):
                result.append(part)
            else:
                result += _split(part, next(own_pieces), contents, lead)
        return tuple(result)

    def _lead_length(self, tokens: tuple[int, ...], length: int) -> int:
        limits = self._limits
        if 0 < length <= min(limits.max_lead, len(tokens)):
            return length
        return self._cutter.line_end(tokens, limits.min_lead, limits.max_lead)

    def _texts(self, parts: PromptParts, lead: int, exact: int) -> list[_Text]:
        texts = []
        for number, part in enumerate(parts):
            if not isinstance(part, TextPart):
                continue
            skipped = lead if number == 0 else 0
            pieces = self._cutter.cut(part.tokens[skipped:])
            moved = [Piece(p.start + skipped, p.stop + skipped) for p in pieces]
            if part is parts[-1]:
                # the question stays text, and a prompt ends with text
                moved = moved[:-1]
            least = exact if number == 0 else 0
            large = [
                p
                for p in moved
                if p.start >= least
                and p.num_tokens >= self._cutter.min_tokens
                and p.stop < len(part.tokens) + (part is not parts[-1])
            ]
            texts.append(_Text(part, large))
        return texts

    def _exact_prefix(self, chain: Sequence[bytes]) -> int:
        count = 0
        for key in chain:
            if key not in self._prefixes:
                break
            self._prefixes.move_to_end(key)
            count += 1
        return count * _BLOCK

    def _note_prefix(self, chain: Sequence[bytes]) -> None:
        for key in chain:
            self._prefixes[key] = None
            self._prefixes.move_to_end(key)
        while len(self._prefixes) * _BLOCK > self._limits.most_tokens:
            self._prefixes.popitem(last=False)

    def _note(self, key: bytes, num_tokens: int) -> DocumentContent:
        """The content of a piece, which is now the latest one."""
        known = self._seen.get(key)
        if known is not None:
            self._seen.move_to_end(key)
            return known[1]
        content = DocumentContent()
        self._seen[key] = num_tokens, content
        self._room -= num_tokens
        while self._room < 0 and len(self._seen) > 1:
            _, (oldest_tokens, _) = self._seen.popitem(last=False)
            self._room += oldest_tokens
        return content


def num_discovered(parts: PromptParts) -> int:
    """Tokens of a prompt in discovered documents."""
    return sum(len(part.tokens) for part in parts if is_discovered(part))


def is_discovered(part: TextPart | DocumentPart) -> bool:
    """Whether discovery made a part."""
    return isinstance(part, DocumentPart) and part.discovered


def _split(
    part: TextPart,
    pieces: Sequence[tuple[bytes, Piece]],
    contents: dict[bytes, DocumentContent],
    lead: int,
) -> Iterator[TextPart | DocumentPart]:
    """``part`` as its pieces and the text between them."""
    at = 0
    for key, piece in pieces:
        if at < piece.start:
            yield _text(part, at, piece.start)
        tokens = part.tokens[piece.start : piece.stop]
        yield DocumentPart(tokens, lead, DISCOVERED, contents[key], discovered=True)
        at = piece.stop
    if at < len(part.tokens):
        yield _text(part, at, len(part.tokens))


def _text(part: TextPart, start: int, stop: int) -> TextPart:
    shared = min(part.num_shared, stop) if start == 0 else 0
    opens = part.opens_answer and stop == len(part.tokens)
    return replace(part, tokens=part.tokens[start:stop], num_shared=shared, opens_answer=opens)


def _chain(root: bytes, tokens: tuple[int, ...]) -> Iterator[bytes]:
    """One key per full block of ``tokens``, each after all blocks before it."""
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        root = _digest(root, struct.pack(f"<{_BLOCK}i", *tokens[start : start + _BLOCK]))
        yield root


def _piece_key(root: bytes, text: _Text, piece: Piece) -> bytes:
    tokens = text.part.tokens[piece.start : piece.stop]
    return _digest(root, struct.pack(f"<{len(tokens)}i", *tokens))


def _digest(*parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=32)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()
