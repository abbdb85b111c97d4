"""Content-defined cuts of token sequences: equal texts get equal pieces wherever they are.

Markers, such as the borders of chat messages, always end a piece. Inside a message a piece ends at
a line end if a hash of the tokens before it has a certain remainder. Cuts therefore depend on a few
tokens around them only, and an edit changes the pieces that it touches. Cuts are between tokens of
the rendered prompt, so the ids of a prompt with pieces are the ids of the prompt."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from looseleaf.models.tokenizer.tokenizer import Tokenizer

_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sequence."""

    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """The length of the piece."""
        return self.stop - self.start


@dataclass(frozen=True)
class Cutter:
    """Cuts sequences of one tokenizer.

    ``is_marker`` and ``ends_line`` have one flag per token id. One line end of about
    ``lines_per_cut`` is a cut, by a hash of the last ``window`` tokens. Pieces have ``min_tokens``
    to ``max_tokens`` tokens; shorter messages are one piece each. Without a cut up to there, the
    line end with the smallest hash is one, else the last token."""

    is_marker: npt.NDArray[np.bool_]
    ends_line: npt.NDArray[np.bool_]
    min_tokens: int = 64
    max_tokens: int = 512
    lines_per_cut: int = 8
    window: int = 8

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Cutter":
        """The cutter of a vocabulary. Reads every token once."""
        size = tokenizer.last_token_id + 1
        is_marker, ends_line = np.zeros(size, bool), np.zeros(size, bool)
        is_marker[[i for i in tokenizer.special_token_ids if i < size]] = True
        for token_id in np.flatnonzero(~is_marker):
            ends_line[token_id] = tokenizer.token_bytes(int(token_id)).endswith(b"\n")
        return cls(is_marker, ends_line)

    def cut(self, tokens: tuple[int, ...]) -> list[Piece]:
        """All tokens except markers, in pieces. Time is linear in the tokens."""
        ids = np.asarray(tokens, dtype=np.int64)
        lines = np.flatnonzero(self.ends_line[ids]) + 1
        hashes = self._hashes(ids)[lines - 1]
        borders = lines[hashes % np.uint64(self.lines_per_cut) == 0]
        pieces, start = list[Piece](), 0
        for marker in [*np.flatnonzero(self.is_marker[ids]).tolist(), len(tokens)]:
            while start < marker:
                stop = self._end(start, marker, borders, lines, hashes)
                pieces.append(Piece(start, stop))
                start = stop
            start = marker + 1
        return pieces

    def line_end(self, tokens: tuple[int, ...], least: int, most: int) -> int:
        """The first line end or marker after ``least`` to ``most`` tokens, else ``most``."""
        ids = np.asarray(tokens[:most], dtype=np.int64)
        ends = np.flatnonzero(self.ends_line[ids] | self.is_marker[ids]) + 1
        return next((int(end) for end in ends if end >= least), len(ids))

    def _end(
        self,
        start: int,
        marker: int,
        borders: npt.NDArray[np.int64],
        lines: npt.NDArray[np.int64],
        hashes: npt.NDArray[np.uint64],
    ) -> int:
        """The end of the piece at ``start`` of a message that ends at ``marker``.

        ``lines`` are the line ends, as the index of the token after them, with their ``hashes``."""
        first = np.searchsorted(borders, start + self.min_tokens)
        stop = min(int(borders[first]), marker) if first < len(borders) else marker
        if stop - start <= self.max_tokens:
            return stop
        least = int(np.searchsorted(lines, start + self.min_tokens))
        most = int(np.searchsorted(lines, start + self.max_tokens, side="right"))
        if least == most:
            return start + self.max_tokens
        return int(lines[least + int(np.argmin(hashes[least:most]))])

    def _hashes(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """A hash of each token and those before it, up to ``window``."""
        values = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_FACTOR)
        values ^= values >> np.uint64(29)
        total = np.zeros(len(ids), np.uint64)
        power = 1
        for back in range(min(self.window, len(ids))):
            total[back:] += values[: len(ids) - back] * np.uint64(power)
            power = power * _FACTOR & _MASK
        total ^= total >> np.uint64(32)
        return total
