"""Blocks of tool calls as grammars: texts and JSON arguments in the form of a model's family.

A block is written by the server, which knows the form. Its grammar for the library is made here,
because only the engine knows which texts are added tokens.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from looseleaf.sampling_params import Grammar

AddedIds = Mapping[str, int]
"""The ids of added tokens by their written form."""

_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class CallItem:
    """A piece of a call: a fixed ``text``, JSON of a ``schema``, or a ``regex``.

    ``exact`` refuses a schema that can't be followed; otherwise it becomes that of any object."""

    text: str = ""
    schema: str | None = None
    regex: str | None = None
    exact: bool = True


Call = tuple[CallItem, ...]


@dataclass(frozen=True)
class CallBlock:
    """``before``, up to ``most`` of the ``calls`` with ``between`` among them, and ``after``.

    With a ``trigger``, which begins the block, the output is free until the trigger is complete. An
    ``anchored`` trigger counts at the begin of the output and directly after a block only."""

    calls: tuple[Call, ...]
    before: str = ""
    between: str = ""
    after: str = ""
    most: int = 1
    trigger: str = ""
    anchored: bool = False

    def grammar(self) -> Grammar:
        """The block as a grammar of `SamplingParams`."""
        return Grammar("calls", json.dumps(asdict(self), allow_nan=False))

    @classmethod
    def read(cls, source: str) -> "CallBlock":
        """The block of a grammar. Raises ValueError for another text."""
        try:
            fields = json.loads(source)
            calls = tuple(tuple(CallItem(**item) for item in call) for call in fields.pop("calls"))
            block = cls(calls, **fields)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is no block of calls: {error}") from error
        if not block.calls or block.most < 1:
            raise ValueError("a block has at least one call")
        return block

    def schemas(self) -> list[CallItem]:
        """The items of all schemas, in order."""
        return [item for call in self.calls for item in call if item.schema is not None]

    def relaxed(self, follows: Callable[[str], bool]) -> "CallBlock":
        """The block with any object for each inexact schema that ``follows`` refuses."""

        def relax(item: CallItem) -> CallItem:
            if item.schema is None or item.exact or follows(item.schema):
                return item
            return replace(item, schema=_ANY_OBJECT)

        return replace(self, calls=tuple(tuple(map(relax, call)) for call in self.calls))

    def lark(self, added: AddedIds, library_schema: Callable[[str], str]) -> str:
        """The grammar in the library's notation; ``library_schema`` adapts schemas to it.

        A grammar with a trigger begins with the tokens that complete the trigger."""
        rules: list[str] = []
        names = [self._call_rule(n, rules, added, library_schema) for n in range(len(self.calls))]
        call = "(" + " | ".join(names) + ")"
        rest = f"{_text(self.between, added)} {call}".strip()
        calls = call if self.most == 1 else f"{call} ({rest}){{0,{self.most - 1}}}"
        begin = _text(self.before, added)
        return "\n".join(
            [
                f"start: {self._opening(added, rules)} {begin} {calls} {_text(self.after, added)}",
                *rules,
                "",
            ]
        )

    def opens_with_token(self, added: AddedIds) -> int | None:
        """The id of the added token that is the trigger, if it is one."""
        return added.get(self.trigger)

    def _opening(self, added: AddedIds, rules: list[str]) -> str:
        if not self.trigger or self.trigger in added:
            return ""
        # the token that completes the trigger may begin before it
        rules.append(f"opening[lazy]: /(?s:.*){_escaped(self.trigger)}/")
        return "opening"

    def _call_rule(
        self,
        number: int,
        rules: list[str],
        added: AddedIds,
        library_schema: Callable[[str], str],
    ) -> str:
        name, pieces = f"call{number}", []
        for place, item in enumerate(self.calls[number]):
            if item.schema is not None:
                rules.append(f"{name}_{place}: %json {library_schema(item.schema)}")
                pieces.append(f"{name}_{place}")
            elif item.regex is not None:
                rules.append(f"{name}_{place}: /{item.regex}/")
                pieces.append(f"{name}_{place}")
            else:
                pieces.append(_text(item.text, added))
        rules.append(f"{name}: " + " ".join(filter(None, pieces)))
        return name

    def without_trigger(self) -> "CallBlock":
        """The block after its trigger, which begins ``before`` or every call."""
        if self.before.startswith(self.trigger):
            return replace(self, before=self.before.removeprefix(self.trigger))
        calls = []
        for first, *more in self.calls:
            if not first.text.startswith(self.trigger):
                raise ValueError(f"a call does not begin with its trigger {self.trigger!r}")
            calls.append((replace(first, text=first.text.removeprefix(self.trigger)), *more))
        return replace(self, calls=tuple(calls))


def _text(text: str, added: AddedIds) -> str:
    """``text`` as literals, with ids for its added tokens."""
    if not text:
        return ""
    markers = [re.escape(marker) for marker in sorted(added, key=len, reverse=True) if marker]
    pieces: Sequence[str] = re.split("(" + "|".join(markers) + ")", text) if markers else [text]
    literals: list[Any] = [
        f"<[{added[piece]}]>" if piece in added else json.dumps(piece) for piece in pieces if piece
    ]
    return " ".join(literals)


def _escaped(text: str) -> str:
    """``text`` as a regular expression inside slashes."""
    return "".join(c if c.isalnum() or c in "_ " else rf"\x{{{ord(c):x}}}" for c in text)
