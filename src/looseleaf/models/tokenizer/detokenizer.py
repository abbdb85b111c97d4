"""From token ids to text, as a whole or as a stream of complete characters.

Every token has fixed bytes, independent of its neighbours. The text is these bytes, read as UTF-8.
So a stream and a whole decode are equal. Each maximal run of invalid bytes becomes one U+FFFD.
Valid UTF-8 gives the result of the tokenizer's own decoder.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from looseleaf.errors import UnsupportedModel
from looseleaf.models.tokenizer.beginnings import prepend_scheme

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The byte of each character that byte-level tokenizers write."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TokenBytes:
    """The bytes of each token, by the rules of a ``tokenizer.json`` decoder.

    ``strip_start`` is the number of leading spaces that the decoder strips from a text. -1 strips
    all spaces of the first token. Raises UnsupportedModel for an unknown decoder step.
    """

    def __init__(self, decoder: object, token: Callable[[int], str | None]) -> None:
        self._token = token
        self._cache: dict[int, bytes] = {}
        self._alphabet: dict[str, int] = {}
        self._replace: list[tuple[str, str]] = []
        self._byte_fallback = False
        self.strip_start = 0
        for step in _steps(decoder):
            self._apply_step(step)

    def __getitem__(self, token_id: int) -> bytes:
        spelling = self._cache.get(token_id)
        if spelling is None:
            spelling = self._cache[token_id] = self._spell(self._token(token_id) or "")
        return spelling

    def _apply_step(self, step: Mapping[str, Any]) -> None:
        kind = step.get("type")
        if kind == "ByteLevel":
            self._alphabet = byte_alphabet()
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self._replace.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self._replace.append((step["replacement"], " "))
            self.strip_start = 0 if prepend_scheme(step) == "never" else -1
        elif kind == "Strip" and step["content"] == " " and not step["stop"]:
            self.strip_start = int(step["start"])
        elif kind != "Fuse":
            raise UnsupportedModel(
                f"the tokenizer's decoder step {kind!r} is not implemented; supported are "
                "byte-level BPE and SentencePiece-style tokenizers"
            )

    def _spell(self, token: str) -> bytes:
        if self._alphabet and all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replace:
            token = token.replace(old, new)
        return token.encode()


class Detokenizer:
    """Decodes a growing run of token ids: ``push`` each id, then ``finish``.

    The joined results are the text of the whole run. The bytes of an incomplete character wait for
    the next token.
    """

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int] = frozenset()) -> None:
        self._bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = token_bytes.strip_start

    def follow(self, before: Iterable[int]) -> None:
        """Start the run after the tokens ``before``, which use up stripped spaces."""
        for token_id in before:
            if not self._strip:
                return
            if token_id not in self._skipped and (piece := self._bytes[token_id]):
                self._strip_spaces(piece)

    def push(self, token_id: int) -> str:
        """The characters that this token completes; may be empty."""
        if token_id in self._skipped:
            return ""
        piece = self._bytes[token_id]
        if self._strip and piece:
            piece = self._strip_spaces(piece)
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """U+FFFD if the run ends inside a character, else an empty string."""
        return self._utf8.decode(b"", final=True)

    def _strip_spaces(self, piece: bytes) -> bytes:
        if self._strip < 0:
            self._strip = 0
            return piece.replace(b" ", b"")
        spaces = len(piece) - len(piece.lstrip(b" "))
        rest = piece[min(spaces, self._strip) :]
        # the next token is stripped only if this one is all spaces
        self._strip = 0 if rest else self._strip - len(piece)
        return rest


def _steps(decoder: object) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise UnsupportedModel(
            "tokenizer.json has no decoder, so tokens can't be turned into text; use a checkpoint "
            "whose tokenizer is byte-level BPE or SentencePiece-style"
        )
    if not isinstance(decoder, Mapping) or "type" not in decoder:
        raise UnsupportedModel(
            "the tokenizer's decoder does not say of which type it is; save the tokenizer again "
            "with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]
