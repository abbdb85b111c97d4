"""Plain templates: one loop over the messages and no growing values, so their work is bounded.

`plain_nodes` allows a closed list of Jinja nodes. A plain template takes about nodes × messages ×
characters steps, so it needs no child process.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_STEPS = 2 * 10**8
"""Most steps of a plain template outside of a child process."""

_MAX_ARGUMENT = 64
_MAX_INDENT = 8
_SIMPLE = {
    *("Template", "Output", "TemplateData", "If", "CondExpr", "Const", "Scope", "Break"),
    *("Continue", "Compare", "Operand", "And", "Or", "Not", "Concat", "Add", "Sub", "Getattr"),
    *("Getitem", "Slice", "Name", "Keyword"),
}
_FILTERS = {"trim", "length", "count", "upper", "lower", "string", "default", "d"}
_TESTS = {
    *("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number"),
    *("integer", "boolean", "true", "false"),
}
_METHODS = {"strip", "lstrip", "rstrip", "startswith", "endswith", "upper", "lower", "get"}


def plain_nodes(source: str) -> int | None:
    """The number of syntax nodes of a plain template; None if it is not plain."""
    from looseleaf.sandbox.templates import make_environment

    checker = _Checker()
    try:
        checker.check(make_environment().parse(source))
    except Exception:
        # the compiler reports syntax errors
        return None
    return checker.nodes


def size_of(value: Any) -> int:
    """Characters of all texts in ``value``, plus 1 for each element."""
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, Mapping):
        return 1 + sum(size_of(key) + size_of(inner) for key, inner in value.items())
    if isinstance(value, Sequence):
        return 1 + sum(map(size_of, value))
    return 1


class _NotPlain(Exception):
    """The form of a node does not bound its work."""


def _require(condition: bool) -> None:
    if not condition:
        raise _NotPlain


class _Checker:
    """Walks a syntax tree and counts its nodes. Raises `_NotPlain`."""

    def __init__(self) -> None:
        self.nodes = 0
        self._in_loop = False
        self._assigned: set[str] = set()
        self._checks: dict[str, Callable[[Any], bool]] = {
            "Filter": _is_plain_filter,
            "Test": lambda node: node.name in _TESTS and not node.args,
            "Call": _is_plain_call,
            "Mod": _is_plain_remainder,
            "List": lambda node: all(map(_is_constant, node.items)),
            "Tuple": lambda node: all(map(_is_constant, node.items)),
            "Assign": self._is_plain_assignment,
        }

    def check(self, node: Any) -> None:
        self.nodes += 1
        kind = _kind(node)
        if kind == "For":
            self._check_loop(node)
            return
        _require(kind in _SIMPLE or (kind in self._checks and self._checks[kind](node)))
        for inner in node.iter_child_nodes():
            self.check(inner)

    def _check_loop(self, node: Any) -> None:
        _require(not self._in_loop and not node.recursive and _kind(node.target) == "Name")
        _require(node.target.name not in ("messages", "loop") and _is_messages(node.iter))
        self._in_loop = True
        for inner in [*node.body, *node.else_, *filter(None, [node.test])]:
            self.check(inner)
        self._in_loop = False

    def _is_plain_assignment(self, node: Any) -> bool:
        if _kind(node.target) != "Name" or node.target.name in ("messages", "loop"):
            return False
        # repeated sums of assigned names would grow exponentially
        parts = [node.node, *_below(node.node)]
        grows = any(_kind(part) in ("Concat", "Add") for part in parts)
        names = {part.name for part in parts if _kind(part) == "Name"}
        plain = not grows and not names & self._assigned
        self._assigned.add(node.target.name)
        return plain


def _kind(node: Any) -> str:
    return type(node).__name__


def _below(node: Any) -> list[Any]:
    from jinja2.nodes import Node

    return list(node.find_all(Node))


def _is_messages(node: Any) -> bool:
    """``messages``, or a slice of it."""
    if _kind(node) == "Getitem" and _kind(node.arg) == "Slice":
        bounds = filter(None, (node.arg.start, node.arg.stop, node.arg.step))
        return _is_messages(node.node) and all(map(_is_number, bounds))
    return _kind(node) == "Name" and node.name == "messages"


def _is_number(node: Any) -> bool:
    return _kind(node.node if _kind(node) == "Neg" else node) == "Const"


def _is_constant(node: Any) -> bool:
    return _kind(node) == "Const"


def _is_short(node: Any) -> bool:
    return _is_constant(node) and len(str(node.value)) <= _MAX_ARGUMENT


def _is_plain_filter(node: Any) -> bool:
    if node.node is None or node.dyn_args or node.dyn_kwargs:
        return False
    if node.name == "tojson":
        # nested tojson filters escape backslashes exponentially
        if any(_kind(part) == "Filter" and part.name == "tojson" for part in _below(node)):
            return False
        widths = [pair.value for pair in node.kwargs if pair.key == "indent"]
        fits = all(_is_constant(width) and _is_indent(width.value) for width in widths)
        return fits and not node.args and len(widths) == len(node.kwargs)
    return node.name in _FILTERS and not node.kwargs and all(map(_is_short, node.args))


def _is_indent(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value <= _MAX_INDENT)


def _is_plain_call(node: Any) -> bool:
    called, arguments = node.node, node.args
    if node.kwargs or node.dyn_args or node.dyn_kwargs:
        return False
    if _kind(called) == "Name" and called.name == "raise_exception":
        return True
    if _kind(called) == "Name" and called.name == "strftime_now":
        # a width such as %2000000000d produces a text of that length
        return all(_is_short(arg) and not any(map(str.isdigit, arg.value)) for arg in arguments)
    return _kind(called) == "Getattr" and called.attr in _METHODS and all(map(_is_short, arguments))


def _is_plain_remainder(node: Any) -> bool:
    """A remainder of the loop index; for texts ``%`` is formatting."""
    operand = node.left
    return (
        _kind(operand) == "Getattr"
        and _kind(operand.node) == "Name"
        and operand.node.name == "loop"
        and operand.attr in ("index", "index0")
        and _is_constant(node.right)
    )
