"""Bodies looked through as bytes while they arrive: how deep they nest, and how many values they
hold. A body that is refused here is never parsed.

Parsing holds the interpreter from the first value to the last, in whatever thread it is done, so
that no answer gets a token meanwhile. What bounds that time is the number of values, not of
bytes: a text of a megabyte is read in one piece."""

import numpy as np

from looseleaf.server.errors import ApiError

MAX_DEPTH = 64
"""Arrays and objects inside each other; grammars of deeper schemas are of no use to anybody."""

LEAST_VALUES = 2**16
"""Any server takes so many: they are parsed and checked within some 15 ms."""

_MARKS = (b",", b":", b"[", b"{")
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_LEVELS = np.zeros(256, np.int64)
_LEVELS[list(b"[{")] = 1
_LEVELS[list(b"]}")] = -1


def most_values(max_model_len: int) -> int:
    """How many values and names a body may have: several prompts of the whole context, as token
    ids."""
    return max(LEAST_VALUES, 4 * max_model_len)


class Scan:
    """What is known of a body after each of its pieces. Of JSON it is exact; what is none, the
    parser refuses where it begins to be none."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values = self._quotes = self._depth = 0
        self._inside = False
        self._rest = b""

    def push(self, piece: bytes) -> None:
        """Look through the next piece. Raises ApiError (400) once a body has too many values, or
        nests too deep."""
        if not piece:
            return
        piece = self._rest + piece
        # half of an escape waits for its other half
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
        if max(self._values, self._quotes // 2) > self._most:
            raise ApiError(
                400,
                f"the body has more than {self._most} values and names: send fewer prompts at a "
                "time, or texts instead of token ids",
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
