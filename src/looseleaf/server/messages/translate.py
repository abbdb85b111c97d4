"""From Anthropic's requests to chat requests. Results of tools become messages of their own."""

import json
from collections.abc import Iterator, Sequence

from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.messages import (
    ClientTool,
    CountTokensRequest,
    DocumentBlock,
    InputBlock,
    InputMessage,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    PlainSource,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from looseleaf.server.translation import (
    Json,
    alternating,
    chat_request,
    function_call,
    text_part,
)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def translate(body: CountTokensRequest) -> ChatRequest:
    """The chat request of a body. Raises ApiError (400)."""
    system = [{"role": "system", "content": _text(body.system)}] if body.system else []
    translated = [each for message in body.messages for each in _translated(message)]
    messages = [*system, *alternating(translated)]
    limits: Json = {}
    if isinstance(body, MessagesRequest):
        limits = {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None}
    return chat_request(
        body,
        messages=messages,
        continue_final_message=messages[-1]["role"] == "assistant" or None,
        response_format=_format(body),
        **limits,
        **_tools(body),
        **_thoughts(body),
    )


def _translated(message: InputMessage) -> Iterator[Json]:
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
    elif message.role == "assistant":
        yield _assistant(message.content)
    elif message.role == "system":
        yield {"role": "system", "content": _text(message.content)}
    else:
        yield from _user(message.content)


def _user(blocks: Sequence[InputBlock]) -> Iterator[Json]:
    """Results of tools, and messages of the blocks between them."""
    parts: list[Json] = []
    for block in blocks:
        if not isinstance(block, ToolResultBlock):
            parts += _part(block)
            continue
        if parts:
            yield {"role": "user", "content": parts}
            parts = []
        yield {"role": "tool", "content": _result(block), "tool_call_id": block.tool_use_id}
    if parts or not blocks:
        yield {"role": "user", "content": parts or ""}


def _result(block: ToolResultBlock) -> str | list[Json]:
    prefix = "Error: " if block.is_error else ""
    content = block.content or ""
    if isinstance(content, str):
        return prefix + content
    parts = [part for inner in content for part in _part(inner)]
    return [text_part(prefix), *parts] if prefix else parts


def _assistant(blocks: Sequence[InputBlock]) -> Json:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        function_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return {
        "role": "assistant",
        "content": None if calls and not texts else "".join(texts),
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def _part(block: InputBlock) -> list[Json]:
    """The part of a message that shows a block; none for another kind of block."""
    if isinstance(block, TextBlock):
        return [text_part(block.text)]
    if isinstance(block, SearchResultBlock):
        text = _text(block.content)
    elif not isinstance(block, DocumentBlock):
        return []
    elif isinstance(block.source, PlainSource):
        text = block.source.data
    else:
        text = _text(block.source.content)
    return [{"type": "document", "title": block.title, "text": text}]


def _text(content: str | Sequence[InputBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def _tools(body: CountTokensRequest) -> Json:
    choice = body.tool_choice
    fields: Json = {"tools": [_tool(tool) for tool in body.tools or ()] or None}
    if isinstance(choice, NamedChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        fields["tool_choice"] = _CHOICES[choice.type]
    if choice is not None and not isinstance(choice, NoChoice):
        fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    return fields


def _tool(tool: ClientTool) -> Json:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _thoughts(body: CountTokensRequest) -> Json:
    """Variables of the template, and whether the answer shows thoughts."""
    thinking, config = body.thinking, body.output_config
    thinks = thinking is not None and thinking.type != "disabled"
    is_adaptive = thinking is not None and thinking.type == "adaptive"
    variables = {} if is_adaptive else {"enable_thinking": thinks}
    effort = config.effort if config is not None and thinks else None
    return {
        "chat_template_kwargs": {**variables, **(body.chat_template_kwargs or {})},
        "reasoning_effort": "xhigh" if effort == "max" else effort,
        "include_reasoning": thinking is not None and thinks and thinking.display != "omitted",
    }


def _format(body: CountTokensRequest) -> Json | None:
    output = None if body.output_config is None else body.output_config.format
    if output is None:
        return None
    schema = {"name": "answer", "schema": output.schema_, "strict": True}
    return {"type": "json_schema", "json_schema": schema}
