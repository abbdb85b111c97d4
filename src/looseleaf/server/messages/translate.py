"""From Anthropic's requests to chat requests.

Results of tools become messages of their own. Adjacent messages of one role are joined, because
many templates require that roles alternate."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from looseleaf.server.protocol.chat import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    DocumentContent,
    TextContent,
)
from looseleaf.server.protocol.common import JsonSchema, JsonSchemaFormat
from looseleaf.server.protocol.messages import (
    ClientTool,
    CountTokensRequest,
    DocumentBlock,
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
from looseleaf.server.protocol.tools import (
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolCall,
)
from looseleaf.server.translation import chat_request, translation

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

Json = dict[str, Any]


@translation()
def translate(body: CountTokensRequest) -> ChatRequest:
    """The chat request of a body. Raises ApiError (400)."""
    messages = [*_messages(body)]
    continues = messages[-1].role == "assistant"
    limits: Json = {}
    if isinstance(body, MessagesRequest):
        limits = {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None}
    return chat_request(
        body,
        messages=messages,
        continue_final_message=continues or None,
        response_format=_format(body),
        **limits,
        **_tools(body),
        **_thoughts(body),
    )


def _messages(body: CountTokensRequest) -> Iterator[ChatMessage]:
    """The conversation, with the system text first."""
    if body.system:
        yield ChatMessage(role="system", content=_text(body.system))
    last: ChatMessage | None = None
    for message in body.messages:
        for translated in _translated(message):
            if last is not None and last.role == translated.role != "tool":
                last = _joined(last, translated)
                continue
            if last is not None:
                yield last
            last = translated
    if last is not None:
        yield last


def _translated(message: InputMessage) -> Iterator[ChatMessage]:
    if isinstance(message.content, str):
        yield ChatMessage(role=message.role, content=message.content)
    elif message.role == "assistant":
        yield _assistant(message.content)
    elif message.role == "system":
        yield ChatMessage(role="system", content=_text(message.content))
    else:
        yield from _user(message.content)


def _user(blocks: Sequence[Any]) -> Iterator[ChatMessage]:
    """Results of tools, and messages of the blocks between them."""
    parts: list[ContentPart] = []
    for block in blocks:
        if not isinstance(block, ToolResultBlock):
            parts.append(_part(block))
            continue
        if parts:
            yield ChatMessage(role="user", content=parts)
            parts = []
        yield ChatMessage(role="tool", content=_result(block), tool_call_id=block.tool_use_id)
    if parts or not blocks:
        yield ChatMessage(role="user", content=parts or "")


def _result(block: ToolResultBlock) -> str | list[ContentPart]:
    prefix = "Error: " if block.is_error else ""
    if isinstance(block.content, str) or not block.content:
        return prefix + (block.content or "")
    parts = [_part(part) for part in block.content]
    return [TextContent(type="text", text=prefix), *parts] if prefix else parts


def _assistant(blocks: Sequence[Any]) -> ChatMessage:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        ToolCall(
            id=block.id,
            function=FunctionCall(
                name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)
            ),
        )
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return ChatMessage(
        role="assistant",
        content=None if calls and not texts else "".join(texts),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _part(block: TextBlock | DocumentBlock | SearchResultBlock) -> ContentPart:
    if isinstance(block, TextBlock):
        return TextContent(type="text", text=block.text)
    if isinstance(block, SearchResultBlock):
        text = _text(block.content)
    elif isinstance(block.source, PlainSource):
        text = block.source.data
    else:
        text = _text(block.source.content)
    return DocumentContent(type="document", title=block.title, text=text)


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    """One message of two messages of one role."""
    thoughts = [m.reasoning_content for m in (first, second) if m.reasoning_content]
    calls = [*(first.tool_calls or ()), *(second.tool_calls or ())]
    if isinstance(first.content, list) or isinstance(second.content, list):
        content: Any = [*_parts(first), *_parts(second)]
    else:
        texts = [text for text in (first.content, second.content) if text]
        content = "\n\n".join(texts) or (None if calls else "")
    return ChatMessage(
        role=first.role,
        content=content,
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _parts(message: ChatMessage) -> list[ContentPart]:
    if isinstance(message.content, list):
        return message.content
    return [TextContent(type="text", text=message.content)] if message.content else []


def _text(content: str | Iterable[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tools(body: CountTokensRequest) -> Json:
    choice = body.tool_choice
    fields: Json = {"tools": [_tool(tool) for tool in body.tools or ()] or None}
    if isinstance(choice, NamedChoice):
        function = FunctionName(name=choice.name)
        fields["tool_choice"] = NamedToolChoice(type="function", function=function)
    elif choice is not None:
        fields["tool_choice"] = _CHOICES[choice.type]
    if choice is not None and not isinstance(choice, NoChoice):
        fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    return fields


def _tool(tool: ClientTool) -> Tool:
    definition = FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=definition)


def _thoughts(body: CountTokensRequest) -> Json:
    """Variables of the template, and whether the answer shows thoughts."""
    thinking, config = body.thinking, body.output_config
    thinks = thinking is not None and thinking.type != "disabled"
    variables: Json = (
        {} if thinking is not None and thinking.type == "adaptive" else {"enable_thinking": thinks}
    )
    effort = None if config is None or not thinks else config.effort
    return {
        "chat_template_kwargs": {**variables, **(body.chat_template_kwargs or {})},
        "reasoning_effort": "xhigh" if effort == "max" else effort,
        "include_reasoning": thinks and thinking is not None and thinking.display != "omitted",
    }


def _format(body: CountTokensRequest) -> JsonSchemaFormat | None:
    output = None if body.output_config is None else body.output_config.format
    if output is None:
        return None
    schema = JsonSchema(name="answer", schema=output.schema_, strict=True)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)
