"""The added tokens that a chat template may write, from the constants in its source.

A template may write a marker whole, or in pieces around a role: ``'<|' + message.role + '|>'``. So
a token counts as written if a constant contains it, or if a concatenation of constants and roles
does. A token of ordinary text, such as a run of spaces, is not a marker.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

# longest marker that several constants may form
_MAX_COMPOSED = 64
_PLACEHOLDER = re.compile(r"%\(?[^%\s]*?[sdrif]|\{[^{}\s]*\}")
# limit on texts that a template replaces
_MAX_REPLACED = 64
_COMPARING = ("in", "notin", "eq", "ne")


def is_ordinary(token: str) -> bool:
    """Whether ``token`` is space, or a single letter or digit."""
    bare = token.strip(" \t\r\n\u2581")
    return not bare or (len(bare) == 1 and bare.isalnum())


class TemplateConstants:
    """The constant texts of a parsed template, and its constants in comparisons with contents."""

    def __init__(self, tree: Any, roles: Iterable[str]) -> None:
        from jinja2 import nodes

        texts = {node.data for node in tree.find_all(nodes.TemplateData)}
        self._texts = texts | set(_strings(tree.find_all(nodes.Const)))
        self._searched = set(_strings(_comparands(tree)))
        self._roles = {form for role in roles for form in (role, role.upper(), role.title())}

    def writes(self, token: str) -> bool:
        """Whether the template may write ``token``, and it is not ordinary text."""
        return not is_ordinary(token) and (self.names(token) or self._composes(token))

    def names(self, text: str) -> bool:
        """Whether a constant contains ``text``."""
        return text in self._joined

    def searches_for(self, token: str) -> bool:
        """Whether the template searches contents for ``token``, as for the end of reasoning.

        False for a token that contains a role, since it may begin a turn."""
        if any(role in token for role in self._roles):
            return False
        return any(token in text for text in self._searched)

    @cached_property
    def _joined(self) -> str:
        return "\0".join(sorted(self._texts))

    @cached_property
    def _pieces(self) -> set[str]:
        # placeholders and replaced texts split a constant into parts
        replaced = sorted(self._searched - {""}, key=len)[:_MAX_REPLACED]
        separators = [_PLACEHOLDER, *(re.compile(re.escape(text)) for text in replaced)]
        parts = {part for text in self._texts for cut in separators for part in cut.split(text)}
        return (self._texts | parts | self._roles) - {""}

    @cached_property
    def _beginnings(self) -> set[str]:
        return {piece[:n] for piece in self._pieces for n in _lengths(piece)}

    @cached_property
    def _endings(self) -> set[str]:
        return {piece[-n:] for piece in self._pieces for n in _lengths(piece)}

    def _composes(self, token: str) -> bool:
        """Whether a suffix of a constant, whole constants and a prefix of a constant form it."""
        length = len(token)
        if not 1 < length <= _MAX_COMPOSED:
            return False
        offsets = [at for at in range(1, length) if token[:at] in self._endings]
        for start in offsets:
            if token[start:] in self._beginnings:
                return True
            # the list grows during the loop, with each offset once
            offsets += [
                end
                for end in range(start + 1, length)
                if end not in offsets and token[start:end] in self._pieces
            ]
        return False


def _lengths(piece: str) -> range:
    return range(1, min(len(piece), _MAX_COMPOSED) + 1)


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    return (node.value for node in constants if isinstance(node.value, str))


def _comparands(tree: Any) -> Iterator[Any]:
    """Constants in comparisons and in arguments of filters and methods, as of ``content.split``."""
    from jinja2 import nodes

    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
        if isinstance(node, nodes.Compare):
            operands = [operand.expr for operand in node.ops if operand.op in _COMPARING]
            values = [node.expr, *operands] if operands else []
        else:
            is_method = isinstance(node, nodes.Filter) or isinstance(node.node, nodes.Getattr)
            values = node.args if is_method else []
        yield from (value for value in values if isinstance(value, nodes.Const))
