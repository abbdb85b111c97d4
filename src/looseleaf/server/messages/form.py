"""From blocks of an answer to Anthropic's messages and their events."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json

from looseleaf.llm.client import Output
from looseleaf.server import report
from looseleaf.server.blocks import Block, BlockBegin, BlockEvent, Blocks, BlockText, Json
from looseleaf.server.errors import MESSAGES_PATH, ApiError
from looseleaf.server.generation import Generation

SIGNATURE = "looseleaf"
"""The signature of thoughts; some clients send back no thoughts without a signature."""

_DELTAS = {
    "text": ("text_delta", "text"),
    "thought": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


@dataclass(eq=False)
class MessageForm:
    """The message of one answer; ``model`` is the name in the request."""

    generation: Generation
    model: str

    def opening(self, request: Output) -> list[Json]:
        """The beginning of the message, and a ping."""
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        usage = {**self._usage(request), "output_tokens": 0}
        return [
            {"type": "message_start", "message": {**message, "usage": usage}},
            {"type": "ping"},
        ]

    def events(self, event: BlockEvent) -> list[Json]:
        """The events of a block."""
        block = event.block
        if isinstance(event, BlockBegin):
            empty = self._content(replace(block, text=""))
            if block.kind == "thought":
                empty["signature"] = ""
            return [{"type": "content_block_start", "index": block.index, "content_block": empty}]
        if isinstance(event, BlockText):
            kind, name = _DELTAS[block.kind]
            return [self._delta(block, {"type": kind, name: event.text})]
        stop = {"type": "content_block_stop", "index": block.index}
        if block.kind == "thought":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            return [self._delta(block, signature), stop]
        return [stop]

    async def ending(self, request: Output, blocks: Blocks) -> list[Json]:
        """The reason of the end, the usage and the report."""
        last = {
            "type": "message_delta",
            "delta": _stop(request, blocks),
            "usage": self._usage(request),
            "looseleaf": self.generation.reuse_report(),
        }
        return [last, {"type": "message_stop"}]

    async def whole(self, request: Output, blocks: Blocks) -> Json:
        """The complete message."""
        return {
            **self._head,
            "content": [self._content(block) for block in blocks.blocks],
            **_stop(request, blocks),
            "usage": self._usage(request),
            "looseleaf": self.generation.reuse_report(),
        }

    def failure(self, error: ApiError) -> Json:
        """The last event of a stream that failed."""
        return error.body_for(MESSAGES_PATH)

    @property
    def _head(self) -> Json:
        number = f"msg_{self.generation.request_id}"
        return {"id": number, "type": "message", "role": "assistant", "model": self.model}

    def _content(self, block: Block) -> Json:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "thought":
            return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
        arguments = arguments_of(block.text)
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}

    def _delta(self, block: Block, delta: Mapping[str, Any]) -> Json:
        return {"type": "content_block_delta", "index": block.index, "delta": delta}

    def _usage(self, request: Output) -> Json:
        usage = report.usage([request])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def arguments_of(text: str) -> Json:
    """The arguments of a call, or those that were written before a limit of tokens.

    Empty for arguments that are no JSON, such as an infinite number."""
    try:
        value = from_json(text or "{}", allow_partial="trailing-strings")
        json.dumps(value, allow_nan=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _stop(request: Output, blocks: Blocks) -> Json:
    output = request.outputs[0]
    sequence = output.stop_reason if isinstance(output.stop_reason, str) else None
    if output.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    reason = "tool_use" if blocks.has_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}
