"""Detection of schemas that require themselves, whose values never end."""

from collections import defaultdict
from typing import Any

from looseleaf.engine.json_schema.tree import (
    JOINED,
    Node,
    SchemaTree,
    children,
    joined,
    required_names,
)
from looseleaf.errors import InvalidRequest


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
