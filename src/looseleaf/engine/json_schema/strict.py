"""Closed objects for ``strict``: an object may have only the properties that its schema names.

This equals ``unevaluatedProperties: false`` on each object that names a property. An object that
``allOf`` or ``$ref`` describe together is closed as a whole. Objects without named properties stay
open, and ``additionalProperties`` in a schema takes precedence.
"""

from typing import Any

from looseleaf.engine.json_schema.tree import Node, SchemaTree, joined, names, together
from looseleaf.errors import InvalidRequest

_OWN = ("properties", "patternProperties", "required")
_DECIDED = ("additionalProperties", "unevaluatedProperties")


def close_objects(tree: SchemaTree) -> None:
    """Close the objects of ``tree`` in place.

    Raises InvalidRequest if an unresolved reference hides properties of an object."""
    parts = _parts(tree)
    for node in tree.nodes:
        if id(node) in parts:
            continue
        target = tree.target(node)
        if _num_descriptions(node) > 1 or (target is not None and id(target) in parts):
            _close_together(node, tree)
        elif _names_properties(node) and not any(name in node for name in _DECIDED):
            _close(node, names(node), [])


def _parts(tree: SchemaTree) -> set[int]:
    """Ids of the subschemas that describe an object together with other subschemas."""
    pending = [
        part for node in tree.nodes if _num_descriptions(node) > 1 for part in joined(node, tree)
    ]
    parts: set[int] = set()
    while pending:
        part = pending.pop()
        if id(part) not in parts:
            parts.add(id(part))
            pending += joined(part, tree)
    return parts


def _num_descriptions(node: Node) -> int:
    all_of = node.get("allOf")
    return (
        (len(all_of) if isinstance(all_of, list) else 0)
        + sum(name in node for name in ("anyOf", "oneOf", "$ref"))
        + any(name in node for name in (*_OWN, *_DECIDED))
    )


def _names_properties(node: Node) -> bool:
    kinds = node.get("type", "object")
    objects = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    return objects and any(name in node for name in _OWN)


def _close_together(node: Node, tree: SchemaTree) -> None:
    described = together(node, tree)
    if any(name in member for member in described for name in _DECIDED):
        return
    for member in described:
        if "$ref" in member and tree.target(member) is None:
            raise InvalidRequest(
                f"the JSON schema can't be followed strictly: {member['$ref']!r} is joined with "
                "other properties; refer to it by '#/…', or set additionalProperties there"
            )
    if any(_names_properties(member) for member in described):
        patterns = [name for member in described for name in _patterns(member)]
        _close(node, [name for member in described for name in names(member)], patterns)


def _patterns(node: Node) -> list[str]:
    patterns = node.get("patternProperties")
    return [*patterns] if isinstance(patterns, dict) else []


def _close(node: Node, properties: list[str], patterns: list[str]) -> None:
    for keyword, known in (("properties", properties), ("patternProperties", patterns)):
        own: Any = node.get(keyword, {})
        if known and isinstance(own, dict):
            node[keyword] = {**own, **{name: True for name in known if name not in own}}
    node["additionalProperties"] = False
