"""From the items of a response's input to chat requests."""

from collections.abc import Iterable, Iterator, Sequence

from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.responses import (
    AllowedTools,
    FunctionChoice,
    FunctionTool,
    ResponsesRequest,
    SchemaFormat,
)
from looseleaf.server.translation import (
    Json,
    alternating,
    chat_request,
    function_call,
    text_part,
)

LOGPROBS = "message.output_text.logprobs"


def items_of(body: ResponsesRequest) -> list[Json]:
    """The items of the input as JSON objects; references are not resolved."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return [item.model_dump(exclude_none=True) for item in body.input]


def translate(body: ResponsesRequest, items: Sequence[Json]) -> ChatRequest:
    """The chat request of a body and the items of its whole conversation. Raises ApiError (400)."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    has_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    return chat_request(
        body,
        messages=[*system, *alternating(_messages(items))],
        max_completion_tokens=body.max_output_tokens,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        include_reasoning=body.include_reasoning,
        chat_template_kwargs=body.chat_template_kwargs,
        logprobs=has_logprobs or None,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        **_tools(body),
    )


def _messages(items: Iterable[Json]) -> Iterator[Json]:
    for item in items:
        kind = item["type"]
        if kind == "message":
            yield {"role": item["role"], "content": _content(item["content"])}
        elif kind == "function_call":
            call = function_call(item["call_id"], item["name"], item["arguments"])
            yield {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "function_call_output":
            output = _content(item["output"])
            yield {"role": "tool", "content": output, "tool_call_id": item["call_id"]}
        else:
            parts = item.get("content") or item.get("summary") or ()
            thought = "\n".join(part["text"] for part in parts)
            yield {"role": "assistant", "content": "", "reasoning_content": thought or None}


def _content(content: str | list[Json]) -> str | list[Json]:
    """The content of a message; a list without documents becomes one text."""
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Json) -> Json:
    if part["type"] == "document":
        return part
    return text_part(part["refusal"] if part["type"] == "refusal" else part["text"])


def _tools(body: ResponsesRequest) -> Json:
    choice, tools = body.tool_choice, body.tools or []
    if isinstance(choice, FunctionChoice):
        named = {"type": "function", "function": {"name": choice.name}}
        return {"tools": [*map(_tool, tools)] or None, "tool_choice": named}
    if isinstance(choice, AllowedTools):
        names = {tool.name for tool in choice.tools}
        allowed = [_tool(tool) for tool in tools if tool.name in names]
        return {"tools": allowed or None, "tool_choice": choice.mode}
    return {"tools": [*map(_tool, tools)] or None, "tool_choice": choice}


def _tool(tool: FunctionTool) -> Json:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _format(body: ResponsesRequest) -> Json | None:
    text_format = None if body.text is None else body.text.format
    if text_format is None:
        return None
    if not isinstance(text_format, SchemaFormat):
        return {"type": text_format.type}
    schema = text_format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}
