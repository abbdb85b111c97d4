"""Constants, bounds and regular expressions, adapted to the grammar library.

Inside a class, JSON Schema reads ``[``, ``&&``, ``--`` and ``~~`` as characters. The library reads
them as nested classes and set operations."""

import math
import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from looseleaf.engine.json_schema.tree import Node, SchemaTree, together
from looseleaf.errors import InvalidRequest

_EXACT = 2**53
_MAX_MULTIPLE = 2**32
# the library clamps larger numbers to 64 bits
_MAX_BOUND = 9 * 10**18
# JSON writes these as \uXXXX only, which outputs do not use
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties"),
)
_BOUNDS = {
    **{"minimum": 1, "exclusiveMinimum": 1},
    **{"maximum": -1, "exclusiveMaximum": -1},
}


def adapt_values(node: Node) -> None:
    """Write counts as ints, and round large bounds inwards to digits that the library preserves.

    Raises InvalidRequest for constants that outputs can't contain exactly."""
    for name in _COUNTS:
        value = node.get(name)
        if isinstance(value, float) and value.is_integer():
            node[name] = int(value)
    for name in ("const", "enum"):
        if name in node:
            _require_writable(node[name], name)
    for name, side in _BOUNDS.items():
        value = node.get(name)
        large = isinstance(value, int | float) and abs(value) > _EXACT
        if large:
            _adapt_bound(node, name, side)


def _adapt_bound(node: Node, name: str, side: int) -> None:
    value = node[name]
    if side * value > _MAX_BOUND and node.get("type") != "number":
        raise InvalidRequest(
            f"the JSON schema can't be followed: {name} {_short(value)} is beyond 64 bits"
        )
    rounding = ROUND_CEILING if side > 0 else ROUND_FLOOR
    bound = float(Context(prec=15, rounding=rounding).create_decimal(Decimal(value)))
    if math.isinf(bound):
        # no double lies beyond
        del node[name]
    else:
        node[name] = bound


def _require_writable(value: Any, name: str) -> None:
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            pending += part.values()
        elif isinstance(part, list):
            pending += part
        elif isinstance(part, str) and _UNWRITABLE.search(part):
            raise InvalidRequest(
                f"the JSON schema can't be followed: {name} has a control character without a "
                "short escape; leave it out"
            )
        elif isinstance(part, int | float) and _inexact(part):
            raise InvalidRequest(
                f"the JSON schema can't be followed: {name} {_short(part)} is beyond 2^53, up to "
                "which numbers are exact; write it as a string"
            )


def require_small_multiples(tree: SchemaTree) -> None:
    """Raises InvalidRequest if the least common multiple of joined ``multipleOf`` exceeds 32 bits.

    The library would ignore a part of them."""
    multiples = {id(node): node["multipleOf"] for node in tree.nodes if _is_multiple(node)}
    if len(set(multiples.values())) < 2:
        return
    for node in tree.nodes:
        values = {multiples[id(part)] for part in together(node, tree) if id(part) in multiples}
        decimals = [Decimal(str(value)) for value in values]
        places = max((-int(value.as_tuple().exponent) for value in decimals), default=0)
        scaled = [int(abs(value).scaleb(max(places, 0))) for value in decimals]
        if len(values) > 1 and math.lcm(*scaled) >= _MAX_MULTIPLE:
            raise InvalidRequest(
                "the JSON schema can't be followed: the common multiple of multipleOf "
                f"{', '.join(map(str, sorted(values)))} is too large"
            )


def _is_multiple(node: Node) -> bool:
    value = node.get("multipleOf")
    return isinstance(value, int | float) and math.isfinite(value)


def _inexact(value: int | float) -> bool:
    return abs(value) > _EXACT if isinstance(value, int) else not math.isfinite(value)


def _short(value: int | float) -> str:
    return str(value) if abs(value) < 1e30 else "of this size"


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
