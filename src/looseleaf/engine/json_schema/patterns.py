"""Regular expressions of JSON Schema, in the notation of the grammar library.

Inside a class, JSON Schema reads ``[``, ``&&``, ``--`` and ``~~`` as characters. The library reads
them as nested classes and set operations.
"""

import re

_TOKEN = re.compile(r"\\.|\[\^?|\]|(?P<repeated>&&|--|~~)|.", re.DOTALL)


def library_pattern(pattern: str) -> str:
    """``pattern`` with the library's class operators escaped."""
    pieces, inside = [], False
    for match in _TOKEN.finditer(pattern):
        piece = match[0]
        if not inside:
            inside = piece.startswith("[")
        elif piece == "]":
            inside = False
        elif piece.startswith("[") or match["repeated"]:
            piece = "".join(f"\\{character}" for character in piece)
        pieces.append(piece)
    return "".join(pieces)
