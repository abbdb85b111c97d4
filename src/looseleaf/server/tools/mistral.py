"""Mistral: ``[TOOL_CALLS]`` before a JSON list, or before a name, ``[ARGS]`` and JSON."""

from collections.abc import Sequence

from looseleaf.server.tools.base import Body, Opening, ToolParser
from looseleaf.server.tools.bodies import NAME, JsonBody, NamedJsonBody
from looseleaf.server.tools.events import Call

_ID = r"(?:\[CALL_ID\]\w{1,64})?"
_HEAD = rf"\s*(?P<name>{NAME}){_ID}(?:\[ARGS\])?\s*(?=\{{)"
_BEGINNING = rf"\s*(?:{NAME})?(?:\[[A-Z_]{{0,7}}\]?\w{{0,64}}){{0,2}}\[?[A-Z]{{0,4}}\]?\s*"


class MistralParser(ToolParser):
    """The list form of older tokenizers and the named form of newer tokenizers."""

    name = "mistral"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    def openings(self) -> Sequence[Opening]:
        return [Opening("[TOOL_CALLS]", lambda parser: _MistralBody())]


class _MistralBody(Body):
    """The form by its first character."""

    def __init__(self) -> None:
        self._inner: Body | None = None

    def feed(self, text: str) -> None:
        self.text += text
        if self._inner is None:
            first = self.text.lstrip()[:1]
            if not first:
                return
            is_list = first == "["
            self._inner = JsonBody() if is_list else NamedJsonBody(_HEAD, _BEGINNING)
            text = self.text
        self._inner.feed(text)
        self.status, self.end = self._inner.status, self._inner.end

    def finish(self) -> None:
        if self._inner is None:
            self.status, self.end = "broken", len(self.text)
            return
        self._inner.finish()
        self.status, self.end = self._inner.status, self._inner.end

    def calls(self) -> Sequence[Call]:
        return () if self._inner is None else self._inner.calls()

    def begun(self) -> Sequence[Call]:
        return () if self._inner is None else self._inner.begun()
