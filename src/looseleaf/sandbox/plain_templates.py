"""Templates whose work is bounded by their form: one loop over the messages, nothing that grows.

`plain_nodes` reads Jinja's syntax tree by a closed list; a node that is not on it is not plain. A
plain template takes about nodes × messages × characters steps, so the caller may render it itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_STEPS = 2 * 10**8
"""Steps of a plain template that a caller may wait for without a limit of time."""

_LONGEST_ARGUMENT = 64
_WIDEST_INDENT = 8
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
    """How many nodes the syntax tree of a plain template has; None if it is not plain."""
    from looseleaf.sandbox.templates import make_environment

    reading = _Reading()
    try:
        reading.read(make_environment().parse(source))
    except Exception:
        # also a syntax error, of which the compiler tells
        return None
    return reading.nodes


def size_of(value: Any) -> int:
    """Characters of all texts in ``value``, and one for each of its parts."""
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


class _Reading:
    """One walk over a syntax tree, which counts its nodes. Raises `_NotPlain`."""

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

    def read(self, node: Any) -> None:
        self.nodes += 1
        kind = _kind(node)
        if kind == "For":
            self._read_loop(node)
            return
        _require(kind in _SIMPLE or (kind in self._checks and self._checks[kind](node)))
        for inner in node.iter_child_nodes():
            self.read(inner)

    def _read_loop(self, node: Any) -> None:
        _require(not self._in_loop and not node.recursive and _kind(node.target) == "Name")
        _require(node.target.name not in ("messages", "loop") and _is_messages(node.iter))
        self._in_loop = True
        for inner in [*node.body, *node.else_, *filter(None, [node.test])]:
            self.read(inner)
        self._in_loop = False

    def _is_plain_assignment(self, node: Any) -> bool:
        if _kind(node.target) != "Name" or node.target.name in ("messages", "loop"):
            return False
        # sums of what was set before could double again and again
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
    return _is_constant(node) and len(str(node.value)) <= _LONGEST_ARGUMENT


def _is_plain_filter(node: Any) -> bool:
    if node.node is None or node.dyn_args or node.dyn_kwargs:
        return False
    if node.name == "tojson":
        # each escapes the backslashes of the one inside it
        once = not any(_kind(part) == "Filter" and part.name == "tojson" for part in _below(node))
        widths = [pair.value for pair in node.kwargs if pair.key == "indent"]
        fits = all(_is_constant(one) and _is_width(one.value) for one in widths)
        return once and fits and not node.args and len(widths) == len(node.kwargs)
    return node.name in _FILTERS and not node.kwargs and all(map(_is_short, node.args))


def _is_width(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value <= _WIDEST_INDENT)


def _is_plain_call(node: Any) -> bool:
    called, arguments = node.node, node.args
    if node.kwargs or node.dyn_args or node.dyn_kwargs:
        return False
    if _kind(called) == "Name" and called.name == "raise_exception":
        return True
    if _kind(called) == "Name" and called.name == "strftime_now":
        # a width, as in %2000000000d, makes a text of that length
        return all(_is_short(one) and not any(map(str.isdigit, one.value)) for one in arguments)
    return _kind(called) == "Getattr" and called.attr in _METHODS and all(map(_is_short, arguments))


def _is_plain_remainder(node: Any) -> bool:
    """Of a loop's number: the remainder of a text is its format."""
    left = node.left
    return (
        _kind(left) == "Getattr"
        and _kind(left.node) == "Name"
        and left.node.name == "loop"
        and left.attr in ("index", "index0")
        and _is_constant(node.right)
    )
