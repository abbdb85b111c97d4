"""``oneOf`` with disjoint branches, rewritten as the equivalent ``anyOf``.

The grammar library accepts ``oneOf`` only if it detects disjoint branches. It does not detect them
through references and among constants.
"""

from itertools import chain
from typing import Any

from looseleaf.engine.json_schema.tree import Node, SchemaTree, required_names

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
