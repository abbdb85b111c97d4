"""Limits the values and the nesting of a JSON body as its bytes arrive, before it is parsed.

`json.loads` holds the interpreter lock, so a long parse delays the tokens of all answers. Its time
grows with the number of values, not of bytes: a text of a megabyte is one value."""

import numpy as np

from looseleaf.server.errors import ApiError

MAX_DEPTH = 64
"""Nesting limit of arrays and objects."""

MIN_VALUES = 2**16
"""Lowest limit of values; parsing and validating them takes about 15 ms."""

_MARKS = (b",", b":", b"[", b"{")
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_LEVELS = np.zeros(256, np.int64)
_LEVELS[list(b"[{")] = 1
_LEVELS[list(b"]}")] = -1


def most_values(max_model_len: int) -> int:
    """The limit of values and names: enough for four full contexts of token ids."""
    return max(MIN_VALUES, 4 * max_model_len)


class Scan:
    """Counts values and depth of a body, piece by piece. Counts are exact for valid JSON."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values = self._quotes = self._depth = 0
        self._inside = False
        self._rest = b""

    def push(self, piece: bytes) -> None:
        """Count the next piece. Raises ApiError (400) above either limit."""
        if not piece:
            return
        piece = self._rest + piece
        # an escape may be split between pieces
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._rest = piece[-1:] if backslashes % 2 else b""
        piece = piece[: len(piece) - len(self._rest)]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        runs = piece.split(b'"')
        outside = b"".join(runs[1::2] if self._inside else runs[::2])
        self._inside ^= len(runs) % 2 == 0
        self._quotes += len(runs) - 1
        self._values += sum(map(outside.count, _MARKS))
        if max(self._values, self._quotes // 2) > self._max_values:
            raise ApiError(
                400,
                f"the body has more than {self._max_values} values and names: send fewer prompts, "
                "or texts instead of token ids",
                code="too_many_values",
            )
        self._follow(outside.translate(None, _NO_BRACKETS))

    def _follow(self, brackets: bytes) -> None:
        if not brackets:
            return
        depths = self._depth + np.cumsum(_LEVELS[np.frombuffer(brackets, np.uint8)])
        if depths.max() > MAX_DEPTH:
            raise ApiError(
                400,
                f"the body can't be read as JSON: it is nested deeper than {MAX_DEPTH} levels",
                code="invalid_json",
            )
        self._depth = int(depths[-1])
