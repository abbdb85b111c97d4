"""Template text, cut at its markers into marker tokens and plain text."""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from looseleaf.models.tokenizer.chat_template import DOCUMENT_CUT, Protector

if TYPE_CHECKING:
    from tokenizers import AddedToken


class MarkerCutter:
    """Cuts template text at ``tokens`` (by id), except at wrapped markers."""

    def __init__(self, tokens: Mapping[int, "AddedToken"], protector: Protector) -> None:
        self._tokens = tokens
        self._protector = protector

    def cut(
        self, text: str, before: "AddedToken | None" = None
    ) -> Iterator[tuple[str, int | None]]:
        """Unwrapped runs of plain text, each with the id of the marker after it, at the end None.

        ``before`` is the marker before ``text``.
        """
        plain, position = "", 0
        for match in self._pattern.finditer(text):
            plain += text[position : match.start()]
            position = match.end()
            if match["wrapped"]:
                plain += self._protector.unprotect(match["wrapped"])
            else:
                marker = int((match.lastgroup or "").removeprefix("id_"))
                yield _stripped(plain, before, self._tokens[marker]), marker
                plain, before = "", self._tokens[marker]
        yield _stripped(plain + text[position:], before, None), None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        def spelled(token_id: int) -> str:
            token = self._tokens[token_id]
            marker = f"(?P<id_{token_id}>{re.escape(token.content)})"
            return rf"(?<!\w){marker}(?!\w)" if token.single_word else marker

        longest = sorted(self._tokens, key=lambda i: len(self._tokens[i].content), reverse=True)
        return re.compile(
            "|".join([f"(?P<wrapped>{self._protector.wrapped.pattern})", *map(spelled, longest)]),
            re.DOTALL,
        )


def cut_at_documents(text: str, protector: Protector) -> list[str]:
    """``text`` cut at each document mark that is not wrapped."""
    pieces, start = [], 0
    pattern = re.compile(f"{protector.wrapped.pattern}|(?P<cut>{DOCUMENT_CUT})", re.DOTALL)
    for match in pattern.finditer(text):
        if match["cut"]:
            pieces.append(text[start : match.start()])
            start = match.end()
    return [*pieces, text[start:]]


def _stripped(text: str, before: "AddedToken | None", after: "AddedToken | None") -> str:
    """``text`` between two markers, without the space that these markers absorb."""
    text = text.lstrip() if before is not None and before.rstrip else text
    return text.rstrip() if after is not None and after.lstrip else text
