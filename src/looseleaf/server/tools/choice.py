"""From a chat request and a chat template to the reader of its answers."""

from collections.abc import Callable, Sequence
from typing import Any

from looseleaf.config import ServerConfig
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.sampling_params import Grammar
from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.tools import FunctionDefinition, NamedToolChoice
from looseleaf.server.tools.base import ToolParser
from looseleaf.server.tools.forced import ForcedParser, forced_calls
from looseleaf.server.tools.reader import AnswerReader
from looseleaf.server.tools.reasoning import choose_splitter, thought_tags
from looseleaf.server.tools.registry import PARSERS, choose_parser

_TAIL_TOKENS = 16
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continues"})


def offered(body: ChatRequest) -> list[FunctionDefinition]:
    """The functions that the template shows; none under ``tool_choice: none``."""
    return [] if body.tool_choice == "none" else [tool.function for tool in body.tools or ()]


def forced(body: ChatRequest) -> list[FunctionDefinition]:
    """The functions of which the answer must call one; empty if it may call none."""
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        return [f for f in offered(body) if f.name == choice.function.name]
    return offered(body) if choice == "required" else []


def tool_grammar(body: ChatRequest) -> Grammar | None:
    """The grammar of forced calls, None if the request forces none."""
    functions = forced(body)
    if not functions:
        return None
    is_named = isinstance(body.tool_choice, NamedToolChoice)
    parallel = body.parallel_tool_calls is not False and not is_named
    return forced_calls(functions, parallel=parallel)


def template_variables(body: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """The variables of the chat template besides the messages.

    Raises ApiError for tools that the template does not show, and for a reserved name."""
    variables: dict[str, Any] = {}
    if body.continue_final_message:
        variables["continues"] = True
    elif body.add_generation_prompt is False:
        variables["add_generation_prompt"] = False
    if body.reasoning_effort == "none":
        variables["enable_thinking"] = False
    elif body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    own = body.chat_template_kwargs or {}
    reserved = [name for name in own if name in _RESERVED or not name.isidentifier()]
    if reserved:
        raise _invalid(
            f"chat_template_kwargs: {reserved[0][:80]!r} can't be set: leave it out",
            "chat_template_kwargs",
        )
    variables |= own
    tools = [
        {"type": "function", "function": function.model_dump(exclude_none=True)}
        for function in offered(body)
    ]
    if tools:
        if "tools" not in tokenizer.chat_template_source(tools=True):
            raise _invalid(
                "this model's chat template shows no tools: leave tools out, or serve a model "
                "that was trained with tools",
                "tools",
            )
        variables["tools"] = tools
    return variables


def reader_factory(
    body: ChatRequest, tokenizer: Tokenizer, prompt_ids: Sequence[int], config: ServerConfig
) -> Callable[[], AnswerReader] | None:
    """Makes the reader of each answer; None if answers are content only.

    Raises ApiError if the template writes no known form of calls."""
    functions = offered(body)
    template = tokenizer.chat_template_source(tools=bool(functions))
    schemas = {f.name: f.parameters or {} for f in functions}
    single = 1 if body.parallel_tool_calls is False else None
    if forced(body):
        return lambda: AnswerReader(None, ForcedParser(schemas, eager=True), max_calls=single)
    parser = _parser(template, config) if functions else None
    tail = tokenizer.decode([*prompt_ids[-_TAIL_TOKENS:]], skip_special=False)
    includes = body.include_reasoning is not False
    follows_grammar = has_format(body)

    def make() -> AnswerReader:
        splitter = None if follows_grammar else choose_splitter(template, tail)
        calls = None if parser is None else parser(schemas)
        return AnswerReader(splitter, calls, includes, single)

    first = make()
    return None if first.splitter is None and first.parser is None else make


def has_format(body: ChatRequest) -> bool:
    """Whether a grammar constrains the text of the answer."""
    if body.response_format is not None and body.response_format.type != "text":
        return True
    names = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return any(getattr(body, name) is not None for name in names)


def shows_markers(body: ChatRequest, tokenizer: Tokenizer, config: ServerConfig) -> bool:
    """Whether answers need their special tokens, because tags of calls or thoughts are special."""
    if forced(body) or has_format(body):
        return False
    functions = offered(body)
    template = tokenizer.chat_template_source(tools=bool(functions))
    tags = thought_tags(template)
    if functions:
        tags += [opening.marker for opening in _parser(template, config)().openings()]
    special = tokenizer.special_token_ids
    return any(tokenizer.token_id(tag) in special for tag in tags)


def _parser(template: str, config: ServerConfig) -> type[ToolParser]:
    name = config.tool_parser
    parser = choose_parser(template) if name is None else PARSERS[name]
    if parser is None:
        raise _invalid(
            "this model's chat template writes no known form of tool calls: serve it with "
            f"--tool-parser, one of {', '.join(PARSERS)}, or force calls by tool_choice",
            "tools",
        )
    return parser


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
