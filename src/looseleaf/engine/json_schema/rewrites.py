"""Rewrites of schemas that the grammar library would violate or reject.

Closed objects for ``strict`` may have only the properties that their schema names. This equals
``unevaluatedProperties: false`` on each object that names a property. An object that ``allOf`` or
``$ref`` describe together is closed as a whole. Objects without named properties stay open, and
``additionalProperties`` in a schema takes precedence.

``oneOf`` with disjoint branches becomes the equivalent ``anyOf``. The library does not detect
disjoint branches through references and among constants.
"""

from itertools import chain
from typing import Any

from looseleaf.engine.json_schema.tree import (
    Node,
    SchemaTree,
    joined,
    names,
    required_names,
    together,
)
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


Value = tuple[str, Any]


def widen_choices(node: Node, tree: SchemaTree) -> None:
    """Replace ``oneOf`` in ``node`` by ``anyOf`` if its branches are disjoint."""
    branches = node.get("oneOf")
    if not isinstance(branches, list) or "anyOf" in node:
        return
    resolved = [_resolved(branch, tree) for branch in branches]
    if all(resolved) and _are_disjoint(resolved):
        entries = [("anyOf" if name == "oneOf" else name, node[name]) for name in node]
        node.clear()
        node.update(entries)


def _resolved(branch: Any, tree: SchemaTree) -> Node:
    """``branch`` with its reference resolved; empty if that fails."""
    seen: set[int] = set()
    while isinstance(branch, dict) and "$ref" in branch and id(branch) not in seen:
        seen.add(id(branch))
        tree.count(1)
        branch = tree.target(branch)
    return branch if isinstance(branch, dict) and "$ref" not in branch else {}


def _are_disjoint(branches: list[Node]) -> bool:
    values = [_values(branch) for branch in branches]
    if all(values):
        return _distinct(values)
    kinds = [_kinds(branch) for branch in branches]
    if all(kinds) and _distinct(kinds):
        return True
    shared = set.intersection(*(_discriminators(branch) for branch in branches))
    return any(
        _distinct([_values(branch["properties"][name]) for branch in branches]) for name in shared
    )


def _distinct(sets: list[set[Any]]) -> bool:
    return sum(map(len, sets)) == len({*chain(*sets)})


def _kinds(branch: Node) -> set[str]:
    kinds = branch.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return set()
    return {"number" if kind == "integer" else kind for kind in kinds}


def _values(branch: Any) -> set[Value]:
    """All values of ``branch`` if it lists them, as strings, integers or null; else empty."""
    if not isinstance(branch, dict):
        return set()
    listed = [branch["const"]] if "const" in branch else branch.get("enum")
    if not isinstance(listed, list):
        return set()
    plain = all(isinstance(value, str | int | None) for value in listed)
    return {(type(value).__name__, value) for value in listed} if plain else set()


def _discriminators(branch: Node) -> set[str]:
    """The required properties of ``branch`` whose values are listed."""
    properties = branch.get("properties")
    if _kinds(branch) != {"object"} or not isinstance(properties, dict):
        return set()
    required = required_names(branch.get("required"))
    return {name for name in required if _values(properties.get(name))}
