"""Mistral: ``[TOOL_CALLS]`` before a JSON list, or before a name, ``[ARGS]`` and JSON."""

from collections.abc import Sequence

from looseleaf.engine.sampling.call_blocks import Call as CallForm
from looseleaf.engine.sampling.call_blocks import CallBlock, CallItem
from looseleaf.server.tools.base import Body, Opening, ToolParser
from looseleaf.server.tools.bodies import NAME, JsonBody, NamedJsonBody
from looseleaf.server.tools.events import Call
from looseleaf.server.tools.forms import Signature, json_calls

_ID = r"(?:\[CALL_ID\]\w{1,64})?"
_HEAD = rf"\s*(?P<name>{NAME}){_ID}(?:\[ARGS\])?\s*(?=\{{)"
_BEGINNING = rf"\s*+(?:{NAME})?(?:\[[A-Z_]{{0,7}}\]?\w{{0,64}}){{0,2}}\[?[A-Z]{{0,4}}\]?\s*+"


class MistralParser(ToolParser):
    """The list form of older tokenizers and the named form of newer tokenizers."""

    name = "mistral"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    @classmethod
    def block(cls, signatures: Sequence[Signature], template: str, most: int = 1) -> CallBlock:
        marker = "[TOOL_CALLS]"
        if "[ARGS]" not in template:
            calls = json_calls(signatures)
            return CallBlock(calls, f"{marker}[", ", ", "]", most, trigger=marker)
        ids = "[CALL_ID]" in template
        return CallBlock(
            tuple(cls._named_call(signature, marker, ids) for signature in signatures),
            most=most,
            trigger=marker,
        )

    @staticmethod
    def _named_call(signature: Signature, marker: str, ids: bool) -> CallForm:
        if not ids:
            return signature.call(f"{marker}{signature.name}[ARGS]")
        begin = (CallItem(f"{marker}{signature.name}[CALL_ID]"), CallItem(regex="[a-zA-Z0-9]{9}"))
        return (*begin, *signature.call("[ARGS]"))

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
