"""From blocks of an answer to OpenAI's responses and their events."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from looseleaf.errors import LooseleafError
from looseleaf.llm.client import Output
from looseleaf.server import report
from looseleaf.server.blocks import Block, BlockBegin, BlockEvent, Blocks, BlockText, Json
from looseleaf.server.errors import ApiError
from looseleaf.server.generation import Generation
from looseleaf.server.protocol.responses import ResponsesRequest
from looseleaf.server.responses.ids import item_id

_COUNT_SECONDS = 5.0
"""Longest time in which the tokens of a finished answer's thoughts are counted."""

Keep = Callable[[Json], Awaitable[bool]]
"""Keeps a complete response for later requests; whether it was kept."""


@dataclass(eq=False)
class ResponseForm:
    """The response ``name`` to one request; ``keep`` is None if it is not stored."""

    generation: Generation
    body: ResponsesRequest
    name: str
    keep: Keep | None
    created: int = field(default_factory=lambda: int(time.time()))
    _number: int = 0

    def opening(self, request: Output) -> list[Json]:
        """The response before its first item."""
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def events(self, event: BlockEvent) -> list[Json]:
        """The events of an item."""
        block = event.block
        if isinstance(event, BlockBegin):
            return self._begin(block)
        if isinstance(event, BlockText):
            return [self._extend(event)]
        return self._end(block)

    async def ending(self, request: Output, blocks: Blocks) -> list[Json]:
        """An empty message if the answer has no item, then the complete response."""
        events: list[Json] = []
        if not blocks.blocks:
            empty = Block(0, "text", is_open=False)
            blocks.blocks.append(empty)
            events += [*self._begin(empty), *self._end(empty)]
        response = await self.whole(request, blocks)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    async def whole(self, request: Output, blocks: Blocks) -> Json:
        """The complete response; it is kept first."""
        is_cut = request.outputs[0].finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        listed = blocks.blocks or [Block(0, "text", is_open=False)]
        output = [self._item(block, "completed") for block in listed]
        if is_cut:
            # the limit of tokens has cut the last item
            output[-1]["status"] = "incomplete"
        response = {
            **self._response(status),
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": self._usage(request, await self._num_thoughts(listed)),
            "looseleaf": self.generation.reuse_report(),
        }
        if self.keep is not None:
            response["store"] = await self.keep(response)
        return response

    def failure(self, error: ApiError) -> Json:
        """The last event of a stream that failed."""
        detail = error.body["error"]
        return self._event(
            "error", code=detail["code"], message=detail["message"], param=detail["param"]
        )

    def _event(self, kind: str, **fields: Any) -> Json:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _begin(self, block: Block) -> list[Json]:
        empty = self._item(replace(block, text="", entries=[]), "in_progress")
        if block.kind == "call":
            return [self._event("response.output_item.added", **_place(block), item=empty)]
        (part,) = empty["content"]
        empty["content"] = []
        return [
            self._event("response.output_item.added", **_place(block), item=empty),
            self._event("response.content_part.added", **self._part_place(block), part=part),
        ]

    def _extend(self, event: BlockText) -> Json:
        block = event.block
        if block.kind == "call":
            kind, place = "response.function_call_arguments.delta", self._item_place(block)
        elif block.kind == "thought":
            kind, place = "response.reasoning_text.delta", self._part_place(block)
        else:
            logprobs = self._logprobs(event.entries)
            kind = "response.output_text.delta"
            place = {**self._part_place(block), "logprobs": logprobs}
        return self._event(kind, **place, delta=event.text)

    def _end(self, block: Block) -> list[Json]:
        item = self._item(block, "completed")
        if block.kind == "call":
            kind, place = "response.function_call_arguments.done", self._item_place(block)
            events = [self._event(kind, **place, name=block.name, arguments=block.text)]
        else:
            place, (part,) = self._part_place(block), item["content"]
            is_text = block.kind == "text"
            kind = "response.output_text.done" if is_text else "response.reasoning_text.done"
            logprobs = {"logprobs": part["logprobs"]} if is_text else {}
            events = [
                self._event(kind, **place, text=block.text, **logprobs),
                self._event("response.content_part.done", **place, part=part),
            ]
        return [*events, self._event("response.output_item.done", **_place(block), item=item)]

    def _item(self, block: Block, status: str) -> Json:
        head = {"id": item_id(self.name, block.kind, block.index), "status": status}
        if block.kind == "call":
            named = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **head, **named}
        if block.kind == "thought":
            part = {"type": "reasoning_text", "text": block.text}
            hidden = {"summary": [], "content": [part], "encrypted_content": None}
            return {"type": "reasoning", **head, **hidden}
        text = {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": self._logprobs(block.entries),
        }
        return {"type": "message", **head, "role": "assistant", "content": [text]}

    def _item_place(self, block: Block) -> Json:
        return {"item_id": item_id(self.name, block.kind, block.index), **_place(block)}

    def _part_place(self, block: Block) -> Json:
        return {**self._item_place(block), "content_index": 0}

    def _logprobs(self, entries: Sequence[report.Entry]) -> list[Json]:
        if not entries:
            return []
        tokenizer = self.generation.service.llm.tokenizer
        listed = report.chat_logprobs(entries, self.body.top_logprobs or 0, tokenizer)["content"]
        return list(listed)

    async def _num_thoughts(self, blocks: Sequence[Block]) -> int:
        """The tokens of the thoughts, counted in a thread; 0 if the tokenizer does not count them.

        A complete answer is more important than this number."""
        generation = self.generation
        encode = generation.service.llm.tokenizer.encode
        thoughts = [block.text for block in blocks if block.kind == "thought"]
        if not thoughts:
            return 0

        def count() -> int:
            return sum(len(encode(text)) for text in thoughts)

        try:
            due = asyncio.get_running_loop().time() + _COUNT_SECONDS
            return await generation.service.prepare(generation.caller, due, count)
        except LooseleafError:
            return 0

    def _usage(self, request: Output, num_thoughts: int) -> Json:
        usage = report.usage([request])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": min(num_thoughts, usage["completion_tokens"])
            },
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, status: str) -> Json:
        """The response without its output."""
        body, params = self.body, self.generation.params
        choice: Any = body.tool_choice or ("auto" if body.tools else "none")
        text_format = None if body.text is None else body.text.format
        reasoning = body.reasoning
        return {
            "id": self.name,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "incomplete_details": None,
            "error": None,
            "model": body.model,
            "output": [],
            "usage": None,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": body.service_tier,
            "store": self.keep is not None,
            "temperature": params.temperature,
            "text": {
                "format": {"type": "text"} if text_format is None else _dumped(text_format),
                "verbosity": "medium",
            },
            "tool_choice": choice if isinstance(choice, str) else _dumped(choice),
            "tools": [_dumped(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }


def _place(block: Block) -> Json:
    return {"output_index": block.index}


def _dumped(value: Any) -> Json:
    dumped: Json = value.model_dump(by_alias=True)
    return dumped
