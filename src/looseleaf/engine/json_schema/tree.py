"""The subschemas of a JSON schema, the targets of its references, and schemas without end."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from looseleaf.errors import InvalidRequest

Node = dict[str, Any]
"""A schema that is an object; booleans have no parts."""

JOINED = ("allOf", "anyOf", "oneOf")
"""Keywords whose subschemas describe the same value as the schema around them."""

_MAPS = frozenset(
    {
        *("properties", "patternProperties", "$defs", "definitions"),
        *("dependentSchemas", "dependencies"),
    }
)
_HOLDERS = frozenset(
    {
        *(*JOINED, "prefixItems", "items", "additionalItems", "contains", "unevaluatedItems"),
        *("additionalProperties", "propertyNames", "unevaluatedProperties"),
        *("not", "if", "then", "else", "contentSchema"),
    }
)
_INDEX = re.compile("0|[1-9][0-9]*")
# steps of a schema, far below a second
_MAX_STEPS = 50_000


class SchemaTree:
    """All subschemas of ``root``, which callers change in place.

    ``nodes`` has each subschema once, parents before children; targets of references are included.
    """

    def __init__(self, root: Node) -> None:
        self._root = root
        self._anchors: dict[str, Node] = {}
        self._targets: dict[str, Any] = {}
        self._num_steps = 0
        # a pointer below another $id is relative to it
        self._has_bases = False
        self.nodes: list[Node] = []
        self._collect()

    def target(self, node: Node) -> Any:
        """The schema that ``$ref`` of ``node`` names; None without ``$ref`` or outside the tree."""
        reference = node.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#") or self._has_bases:
            return None
        known = self._targets.get(reference)
        if known is None:
            known = self._lookup(unquote(reference[1:]))
            self._targets[reference] = known
        return known

    def count(self, steps: int) -> None:
        """Count steps through joined schemas. Raises InvalidRequest above the limit."""
        self._num_steps += steps
        if self._num_steps > _MAX_STEPS:
            raise InvalidRequest(
                "the JSON schema can't be read: too many of its schemas refer to each other; "
                "simplify it"
            )

    def _lookup(self, fragment: str) -> Any:
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(fragment)
        target: Any = self._root
        segments = fragment.split("/")[1:]
        self.count(len(segments))
        for segment in segments:
            key = segment.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict):
                target = target.get(key)
            elif isinstance(target, list) and _INDEX.fullmatch(key) and int(key) < len(target):
                target = target[int(key)]
            else:
                return None
        return target

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
    """The subschemas directly in ``node``, without booleans and malformed values."""
    for name, value in node.items():
        if name in _MAPS and isinstance(value, dict):
            parts: Iterable[Any] = value.values()
        elif name in _HOLDERS:
            parts = value if isinstance(value, list) else (value,)
        else:
            continue
        yield from (part for part in parts if isinstance(part, dict))


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
    """``node`` and all subschemas that describe the same value, at any depth."""
    members: dict[int, Node] = {}
    pending = [node]
    while pending:
        member = pending.pop()
        if id(member) not in members:
            members[id(member)] = member
            parts = [*joined(member, tree)]
            tree.count(1 + len(parts))
            pending += parts
    return [*members.values()]


def names(node: Node) -> list[str]:
    """The properties that ``node`` declares or requires."""
    properties, required = node.get("properties"), node.get("required")
    listed = [*properties] if isinstance(properties, dict) else []
    return [*listed, *required_names(required)]


def required_names(required: Any) -> list[str]:
    """The names in a value of ``required``, each once; empty for a malformed value."""
    if not isinstance(required, list):
        return []
    return [*dict.fromkeys(name for name in required if isinstance(name, str))]


def require_ends(tree: SchemaTree) -> None:
    """Raises InvalidRequest if a subschema has no finite value."""
    targets = [tree.target(node) for node in tree.nodes]
    if not any(isinstance(target, dict) for target in targets):
        return
    ending: set[int] = set()
    users: dict[int, list[Node]] = defaultdict(list)
    for node in tree.nodes:
        for part in [*children(node), *joined(node, tree)]:
            users[id(part)].append(node)
    # children first: most schemas need one pass
    pending = tree.nodes[::-1]
    while pending:
        new = [node for node in pending if _adds_end(node, tree, ending)]
        pending = [user for node in new for user in users[id(node)] if id(user) not in ending]
    for node, target in zip(tree.nodes, targets, strict=True):
        if isinstance(target, dict) and id(target) not in ending:
            raise InvalidRequest(
                f"the JSON schema can't be followed: {node['$ref']!r} needs itself without an "
                "end; make a property on the way optional, or allow null there"
            )


def _adds_end(node: Node, tree: SchemaTree, ending: set[int]) -> bool:
    """Whether ``node`` joins ``ending``, the subschemas with a finite value."""
    if id(node) in ending:
        return False
    if _may_end(node, tree, ending):
        ending.add(id(node))
        return True
    return False


def _may_end(node: Node, tree: SchemaTree, ending: set[int]) -> bool:
    def ends(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in ending

    if "const" in node or "enum" in node:
        return True
    if not ends(tree.target(node)):
        return False
    for name in JOINED:
        parts = node.get(name)
        if isinstance(parts, list) and parts:
            fits = map(ends, parts)
            if not (all(fits) if name == "allOf" else any(fits)):
                return False
    kinds = node.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or any(kind not in ("object", "array") for kind in kinds):
        return True
    return any(all(map(ends, _needed(node, kind))) for kind in kinds)


def _needed(node: Node, kind: str) -> list[Any]:
    """The required parts of objects or arrays of ``node``."""
    if kind == "object":
        properties = node.get("properties")
        known = properties if isinstance(properties, dict) else {}
        required = required_names(node.get("required"))
        return [known.get(name, node.get("additionalProperties")) for name in required]
    least, items = node.get("minItems", 0), node.get("items")
    prefix = node.get("prefixItems")
    if isinstance(items, list):
        prefix, items = items, node.get("additionalItems")
    prefix = prefix if isinstance(prefix, list) else []
    if not isinstance(least, int | float):
        return []
    return [*prefix[: int(least)], *([items] if least > len(prefix) else [])]
