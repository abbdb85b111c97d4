"""GPT-OSS: harmony's channels; a commentary message with a recipient is a call."""

from collections.abc import Sequence

from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import NAME, NamedJsonBody

_TO = rf"to=(?:functions\.)?(?P<name>{NAME})"
_TYPE = r" {0,8}(?:<\|constrain\|>)? {0,8}(?:json)? {0,8}<\|message\|>"
_CHANNEL = r"(?:commentary|analysis)"
_AFTER = rf" {{0,8}}{_CHANNEL} {{1,8}}{_TO}{_TYPE}"
_BEFORE = rf" {{0,8}}{_TO}<\|channel\|>{_CHANNEL}{_TYPE}"
# a header has no message yet
_HALF = r"(?:(?!<\|message\|>)[^{}\n]){0,400}"
_CLOSE = "<|call|>"


class HarmonyParser(ToolParser):
    """Calls of channel headers. `HarmonyReasoning` removes the other headers."""

    name = "harmony"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<|channel|>" in template and "<|message|>" in template

    def openings(self) -> Sequence[Opening]:
        return [
            Opening("<|channel|>", lambda _: NamedJsonBody(_AFTER, _HALF, _CLOSE)),
            Opening("<|start|>assistant", lambda _: NamedJsonBody(_BEFORE, _HALF, _CLOSE)),
        ]
