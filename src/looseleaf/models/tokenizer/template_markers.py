"""Which added tokens a chat template writes, read from its source in all branches at once.

A template may write a marker whole, or in pieces around a role: ``'<|' + message.role + '|>'``. So
a token counts as written if a constant of the template holds it, or if constants and roles, put one
after another, do. A token that text is made of anyway, such as a run of spaces, is no marker.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

# what a marker of several constants has at most; a longer one is found whole
_LONGEST_COMPOSED = 64
_PLACEHOLDER = re.compile(r"%\(?[^%\s]*?[sdrif]|\{[^{}\s]*\}")
# texts that a template replaces; its whole source may be a list of such
_MOST_REPLACED = 64
_COMPARING = ("in", "notin", "eq", "ne")


def is_ordinary(token: str) -> bool:
    """Whether text is made of ``token``: it is space, or a letter."""
    bare = token.strip(" \t\r\n\u2581")
    return not bare or (len(bare) == 1 and bare.isalnum())


class TemplateConstants:
    """The constant texts of a parsed template, and those that it compares contents with."""

    def __init__(self, tree: Any, roles: Iterable[str]) -> None:
        from jinja2 import nodes

        texts = {node.data for node in tree.find_all(nodes.TemplateData)}
        self._texts = texts | set(_strings(tree.find_all(nodes.Const)))
        self._looked_for = set(_strings(_compared(tree)))
        self._roles = {form for role in roles for form in (role, role.upper(), role.title())}

    def writes(self, token: str) -> bool:
        """Whether the template may write ``token``, which text is not made of anyway."""
        return not is_ordinary(token) and (self.names(token) or self._composes(token))

    def names(self, text: str) -> bool:
        """Whether one constant holds ``text``."""
        return text in self._joined

    def looks_for(self, token: str) -> bool:
        """Whether the template looks for ``token`` in contents, as for the end of reasoning; one
        that names a role begins a turn wherever it is."""
        if any(role in token for role in self._roles):
            return False
        return any(token in text for text in self._looked_for)

    @cached_property
    def _joined(self) -> str:
        return "\0".join(sorted(self._texts))

    @cached_property
    def _pieces(self) -> set[str]:
        # what fills a placeholder or replaces a text stands between the parts of a constant
        replaced = sorted(self._looked_for - {""}, key=len)[:_MOST_REPLACED]
        filled = [_PLACEHOLDER, *(re.compile(re.escape(text)) for text in replaced)]
        parts = {part for text in self._texts for cut in filled for part in cut.split(text)}
        return (self._texts | parts | self._roles) - {""}

    @cached_property
    def _beginnings(self) -> set[str]:
        return {piece[:n] for piece in self._pieces for n in _lengths(piece)}

    @cached_property
    def _endings(self) -> set[str]:
        return {piece[-n:] for piece in self._pieces for n in _lengths(piece)}

    def _composes(self, token: str) -> bool:
        """Whether an end of a constant, whole ones, and the beginning of one make ``token``."""
        length = len(token)
        if not 1 < length <= _LONGEST_COMPOSED:
            return False
        reached = [at for at in range(1, length) if token[:at] in self._endings]
        for start in reached:
            if token[start:] in self._beginnings:
                return True
            # the list grows under the loop: each place is reached once
            reached += [
                end
                for end in range(start + 1, length)
                if end not in reached and token[start:end] in self._pieces
            ]
        return False


def _lengths(piece: str) -> range:
    return range(1, min(len(piece), _LONGEST_COMPOSED) + 1)


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    return (node.value for node in constants if isinstance(node.value, str))


def _compared(tree: Any) -> Iterator[Any]:
    """Constants in comparisons and among the arguments of methods, as of ``content.split``."""
    from jinja2 import nodes

    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
        if isinstance(node, nodes.Compare):
            operands = [one for one in node.ops if one.op in _COMPARING]
            given = [node.expr, *(one.expr for one in operands)] if operands else []
        else:
            is_method = isinstance(node, nodes.Filter) or isinstance(node.node, nodes.Getattr)
            given = node.args if is_method else []
        yield from (one for one in given if isinstance(one, nodes.Const))
