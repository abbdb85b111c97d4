"""GPT-OSS: harmony's channels; a commentary message with a recipient is a call."""

from collections.abc import Sequence

from looseleaf.engine.sampling.call_blocks import CallBlock
from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import NAME, NamedJsonBody
from looseleaf.server.tools.forms import Signature

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

    @classmethod
    def block(cls, signatures: Sequence[Signature], template: str, most: int = 1) -> CallBlock:
        trigger = " to=functions."
        calls = tuple(s.call(f"{trigger}{s.name} <|constrain|>json<|message|>") for s in signatures)
        # an answer ends with its call
        return CallBlock(calls, "<|channel|>commentary", trigger=trigger)

    def openings(self) -> Sequence[Opening]:
        return [
            Opening("<|channel|>", lambda _: NamedJsonBody(_AFTER, _HALF, _CLOSE)),
            Opening("<|start|>assistant", lambda _: NamedJsonBody(_BEFORE, _HALF, _CLOSE)),
        ]
