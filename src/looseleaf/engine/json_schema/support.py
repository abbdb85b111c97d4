"""The translation of a JSON schema for the grammar library.

The library itself rejects keywords that it does not implement, such as `not` and `uniqueItems`.
This file covers keywords that the library accepts and violates, which are rewritten or rejected. It
also drops keywords without effect that the library rejects.
"""

import json
import re
from typing import Any

from looseleaf.engine.json_schema.rewrites import close_objects, widen_choices
from looseleaf.engine.json_schema.tree import Node, SchemaTree, names, require_ends, required_names
from looseleaf.engine.json_schema.values import (
    adapt_values,
    library_pattern,
    require_small_multiples,
)
from looseleaf.errors import InvalidRequest

FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    }
)
"""Formats that outputs follow; as in JSON Schema, other formats have no effect."""

_OLD_DRAFTS = frozenset(f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7))
_DRAFTS = _OLD_DRAFTS | {
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
}
# keywords that old drafts read beside a reference
_BESIDE_REFERENCE = ("$ref", "$schema", "$id", "id", "$defs", "definitions")
# keywords such as allOf split a schema for the library; these families must not be split
_FAMILIES = (
    ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"),
    ("prefixItems", "items", "additionalItems"),
)


def library_schema(source: str, strict: bool = False) -> str:
    """The JSON text of a schema that means the same to the library as ``source`` in JSON Schema.

    ``strict`` closes objects. Raises InvalidRequest for text that is not a schema, and for schemas
    that the library would violate.
    """
    try:
        schema = json.loads(source, parse_constant=_refuse_constant)
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, dict):
            raise ValueError("a schema is an object, true or false")
        # an option of the library, not a keyword
        schema.pop("x-guidance", None)
        old = str(schema.get("$schema")).rstrip("#") in _OLD_DRAFTS
        tree = SchemaTree(schema)
        for node in tree.nodes:
            _drop_idle(node, old)
        for node in tree.nodes:
            widen_choices(node, tree)
        if strict:
            close_objects(tree)
        require_small_multiples(tree)
        require_ends(tree)
        for node in tree.nodes:
            _adapt(node)
        return json.dumps(schema, allow_nan=False)
    except InvalidRequest:
        raise
    except RecursionError as error:
        raise InvalidRequest("the JSON schema can't be read: it is nested too deep") from error
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema can't be read: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _drop_idle(node: Node, old: bool) -> None:
    """Remove keywords without effect, which the library rejects or misreads."""
    if old and "$ref" in node:
        for name in [name for name in node if name not in _BESIDE_REFERENCE]:
            del node[name]
    for name in _without_effect(node):
        node.pop(name, None)


def _adapt(node: Node) -> None:
    if isinstance(node.get("pattern"), str):
        node["pattern"] = library_pattern(node["pattern"])
    adapt_values(node)
    _adapt_patterns(node)
    _require_countable(node)
    for family in _FAMILIES:
        _gather(node, family)


def _adapt_patterns(node: Node) -> None:
    patterns, properties = node.get("patternProperties"), node.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return
    own = {f"^{re.escape(name)}$": name for name in names(node)}
    free = {}
    for pattern, schema in patterns.items():
        if pattern in own:
            # the library would require a second name for a pattern that equals a declared name
            name = own[pattern]
            properties[name] = (
                {"allOf": [properties[name], schema]} if name in properties else schema
            )
        else:
            free[library_pattern(pattern)] = schema
    node["patternProperties"] = free
    if properties:
        node["properties"] = properties


def _without_effect(node: Node) -> list[str]:
    idle = []
    if isinstance(node.get("format"), str) and node["format"] not in FORMATS:
        idle.append("format")
    draft = node.get("$schema")
    if isinstance(draft, str) and draft.rstrip("#") not in _DRAFTS:
        idle.append("$schema")
    if not isinstance(node.get("items"), list):
        idle.append("additionalItems")
    if "if" not in node or ("then" not in node and "else" not in node):
        idle += ["if", "then", "else"]
    if "contains" not in node:
        idle += ["minContains", "maxContains"]
    values: dict[str, Any] = {"uniqueItems": False}
    values |= {"unevaluatedItems": True, "unevaluatedProperties": True}
    return idle + [name for name, value in values.items() if node.get(name) is value]


def _require_countable(node: Node) -> None:
    """Raises InvalidRequest if ``minProperties`` may count a repeated key, which must be free."""
    least = node.get("minProperties")
    free = node.get("additionalProperties") is not False or node.get("patternProperties")
    if isinstance(least, int) and free:
        required = len(required_names(node.get("required")))
        if least > required + 1:
            raise InvalidRequest(
                f"the JSON schema can't be followed: minProperties {least} would count a repeated "
                f"key twice; require all but one of the properties by name, or ask for "
                f"{required + 1}"
            )


def _gather(node: Node, family: tuple[str, ...]) -> None:
    """Move the keywords of ``family`` next to the first of them."""
    members = [name for name in node if name in family]
    if len(members) < 2:
        return
    entries = list(node.items())
    node.clear()
    for name, value in entries:
        if name not in family:
            node[name] = value
        elif name == members[0]:
            node.update((member, value) for member, value in entries if member in family)
