"""Numbers of a schema that the grammar library, which reads doubles, would change."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from looseleaf.engine.json_schema.tree import Node
from looseleaf.errors import InvalidRequest

_EXACT = 2**53
# the library counts in 64 bits; beyond, it takes the nearest number that it has
_FARTHEST = 9 * 10**18
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties"),
)
_BOUNDS = {
    **{"minimum": 1, "exclusiveMinimum": 1},
    **{"maximum": -1, "exclusiveMaximum": -1},
}


def adapt_numbers(node: Node) -> None:
    """Write counts as ints, and large bounds with digits that the library keeps: rounded to the
    inside. Raises InvalidRequest for values that it can't write exactly."""
    for name in _COUNTS:
        value = node.get(name)
        if isinstance(value, float) and value.is_integer():
            node[name] = int(value)
    for name in ("const", "enum"):
        if name in node:
            _require_exact(node[name], name)
    for name, side in _BOUNDS.items():
        value = node.get(name)
        large = isinstance(value, int | float) and abs(value) > _EXACT
        if large:
            _adapt_bound(node, name, side)


def _adapt_bound(node: Node, name: str, side: int) -> None:
    value = node[name]
    if side * value > _FARTHEST and node.get("type") != "number":
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


def _require_exact(value: Any, name: str) -> None:
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            pending += part.values()
        elif isinstance(part, list):
            pending += part
        elif isinstance(part, int | float) and _inexact(part):
            raise InvalidRequest(
                f"the JSON schema can't be followed: {name} {_short(part)} is beyond 2^53, up to "
                "which numbers are exact; write it as a string"
            )


def _inexact(value: int | float) -> bool:
    return abs(value) > _EXACT if isinstance(value, int) else not math.isfinite(value)


def _short(value: int | float) -> str:
    return str(value) if abs(value) < 1e30 else "of this size"
