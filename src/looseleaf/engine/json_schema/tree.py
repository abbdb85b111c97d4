"""The subschemas of one JSON schema: every place that holds one, and the targets of references."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Node = dict[str, Any]
"""A schema that is an object; booleans have no parts."""

JOINED = ("allOf", "anyOf", "oneOf")
"""Keywords whose subschemas describe the same value as the schema around them."""

_MAPS = (
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentSchemas", "dependencies"),
)
_LISTS = (*JOINED, "prefixItems", "items")
_SINGLE = (
    *("items", "additionalItems", "contains", "unevaluatedItems"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("not", "if", "then", "else", "contentSchema"),
)
_INDEX = re.compile("0|[1-9][0-9]*")


class SchemaTree:
    """All subschemas of ``root``, which is changed in place by the steps that read the tree.

    ``nodes`` has each subschema once, parents before children; a reference's target is one, too.
    """

    def __init__(self, root: Node) -> None:
        self._root = root
        self._anchors: dict[str, Node] = {}
        # a pointer below another $id is relative to it
        self._has_bases = False
        self.nodes: list[Node] = []
        self._collect()

    def target(self, node: Node) -> Any:
        """The schema that ``$ref`` of ``node`` names; None without one, or outside the tree."""
        reference = node.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#") or self._has_bases:
            return None
        fragment = unquote(reference[1:])
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(fragment)
        place: Any = self._root
        for segment in fragment.split("/")[1:]:
            key = segment.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict):
                place = place.get(key)
            elif isinstance(place, list) and _INDEX.fullmatch(key) and int(key) < len(place):
                place = place[int(key)]
            else:
                return None
        return place

    def _collect(self) -> None:
        pending, known = [self._root], {id(self._root)}
        while pending:
            level, pending = pending, []
            for node in level:
                self.nodes.append(node)
                self._has_bases |= node is not self._root and isinstance(node.get("$id"), str)
                if isinstance(node.get("$anchor"), str):
                    self._anchors[node["$anchor"]] = node
                for child in [*children(node), self.target(node)]:
                    if isinstance(child, dict) and id(child) not in known:
                        known.add(id(child))
                        pending.append(child)


def children(node: Node) -> Iterator[Node]:
    """The subschemas directly in ``node``, booleans and malformed values left out."""
    for values in (node.get(name) for name in _MAPS):
        if isinstance(values, dict):
            yield from (value for value in values.values() if isinstance(value, dict))
    for values in (node.get(name) for name in _LISTS):
        if isinstance(values, list):
            yield from (value for value in values if isinstance(value, dict))
    for value in (node.get(name) for name in _SINGLE):
        if isinstance(value, dict):
            yield value


def joined(node: Node, tree: SchemaTree) -> Iterator[Node]:
    """The subschemas that describe the same value as ``node``, a reference's target included."""
    for name in JOINED:
        values = node.get(name)
        if isinstance(values, list):
            yield from (value for value in values if isinstance(value, dict))
    target = tree.target(node)
    if isinstance(target, dict):
        yield target


def together(node: Node, tree: SchemaTree) -> list[Node]:
    """``node`` and all subschemas that describe the same value, however deep they are joined."""
    members: dict[int, Node] = {}
    pending = [node]
    while pending:
        member = pending.pop()
        if id(member) not in members:
            members[id(member)] = member
            pending += joined(member, tree)
    return [*members.values()]


def names(node: Node) -> list[str]:
    """The properties that ``node`` itself names or requires."""
    properties, required = node.get("properties"), node.get("required")
    listed = [*properties] if isinstance(properties, dict) else []
    return [*listed, *required_names(required)]


def required_names(required: Any) -> list[str]:
    """The names in a value of ``required``, each once; none for a value of another form."""
    if not isinstance(required, list):
        return []
    return [*dict.fromkeys(name for name in required if isinstance(name, str))]
