"""From token ids back to text, whole or token by token, never half a character.

Every token stands for some bytes, whatever its neighbours; text is those bytes read as UTF-8. That
makes a stream and a whole decode equal by construction. Invalid bytes become U+FFFD, each maximal
run one; for valid UTF-8 the result is that of the tokenizer's own decoder.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from looseleaf.errors import UnsupportedModel
from looseleaf.models.tokenizer.beginnings import prepend_scheme

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte, and the byte it stands for."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    alphabet = {chr(byte): byte for byte in shown}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TokenBytes:
    """The bytes of each token, by the rules of a ``tokenizer.json`` decoder.

    ``strip_start`` is how many leading spaces the decoder takes off a whole text, -1 for all of the
    first token's.
    """

    def __init__(self, decoder: object, token: Callable[[int], str | None]) -> None:
        self._token = token
        self._cache: dict[int, bytes] = {}
        self._alphabet: dict[str, int] = {}
        self._replace: list[tuple[str, str]] = []
        self._byte_fallback = False
        self.strip_start = 0
        for step in _steps(decoder):
            self._learn(step)

    def __getitem__(self, token_id: int) -> bytes:
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._spell(self._token(token_id) or "")
        return known

    def _learn(self, step: Mapping[str, Any]) -> None:
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
    """Turns a growing run of token ids into text: ``push`` each id, then ``finish``.

    The pieces, joined, are the text of the whole run. A character cut off between tokens waits for
    its rest.
    """

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int] = frozenset()) -> None:
        self._bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = token_bytes.strip_start

    def follow(self, before: Iterable[int]) -> None:
        """Make the run one that follows the text of the tokens ``before``, spaces included."""
        for token_id in before:
            if not self._strip:
                return
            if token_id not in self._skipped and (piece := self._bytes[token_id]):
                self._strip_spaces(piece)

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, often empty inside a character."""
        if token_id in self._skipped:
            return ""
        piece = self._bytes[token_id]
        if self._strip and piece:
            piece = self._strip_spaces(piece)
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """The rest: U+FFFD if the run ended inside a character."""
        return self._utf8.decode(b"", final=True)

    def _strip_spaces(self, piece: bytes) -> bytes:
        if self._strip < 0:
            self._strip = 0
            return piece.replace(b" ", b"")
        spaces = len(piece) - len(piece.lstrip(b" "))
        kept = piece[min(spaces, self._strip) :]
        # the strip goes on into the next token only while nothing but spaces came
        self._strip = 0 if kept else self._strip - len(piece)
        return kept


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
