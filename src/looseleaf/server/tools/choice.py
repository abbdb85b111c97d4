"""From a chat request and a chat template to the reader of its answers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from looseleaf.config import ServerConfig
from looseleaf.engine.sampling.call_blocks import CallBlock
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.sampling_params import Grammar
from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.tools import FunctionDefinition, NamedToolChoice
from looseleaf.server.schema_limits import require_small
from looseleaf.server.tools.base import ToolParser
from looseleaf.server.tools.forced import MAX_CALLS, ForcedParser, forced_calls
from looseleaf.server.tools.forms import Signature
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


def tool_grammar(body: ChatRequest, tokenizer: Tokenizer, config: ServerConfig) -> Grammar | None:
    """The grammar of calls: of forced calls from the begin, of others from their trigger on.

    None without tools, beside a format of the answer, and for a form without a grammar."""
    functions = forced(body)
    if not functions:
        return _auto_grammar(body, tokenizer, config)
    is_named = isinstance(body.tool_choice, NamedToolChoice)
    parallel = body.parallel_tool_calls is not False and not is_named
    block = _own_block(body, functions, tokenizer, config, MAX_CALLS if parallel else 1)
    if block is None:
        return forced_calls(functions, parallel=parallel)
    return replace(block, trigger="").grammar()


def _auto_grammar(body: ChatRequest, tokenizer: Tokenizer, config: ServerConfig) -> Grammar | None:
    functions = offered(body)
    if not functions or has_format(body) or not tokenizer.eos_token_ids:
        return None
    block = _own_block(body, functions, tokenizer, config, MAX_CALLS)
    if block is None:
        return None
    if not block.before.startswith(block.trigger):
        # the trigger begins each call
        block = replace(block, before="", most=1)
    grammar = block.grammar()
    try:
        require_small(grammar, config)
    except ApiError:
        # large definitions are for the model only
        return None
    return grammar


def _own_block(
    body: ChatRequest,
    functions: Sequence[FunctionDefinition],
    tokenizer: Tokenizer,
    config: ServerConfig,
    most: int,
) -> CallBlock | None:
    """The block of calls in the family's form; None for a form without a grammar."""
    template = tokenizer.chat_template_source(tools=True)
    parser = _find_parser(template, config)
    if parser is None:
        return None
    is_forced = bool(forced(body))
    try:
        signatures = [
            Signature(
                function.name,
                json.dumps({"type": "object", **(function.parameters or {})}, allow_nan=False),
                exact=is_forced or bool(function.strict),
            )
            for function in functions
        ]
    except (RecursionError, ValueError) as error:
        raise _invalid(f"tools: a schema of arguments can't be read: {error}", "tools") from error
    return parser.block(signatures, template, most)


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
        _require_tools(tokenizer.chat_template_source(tools=True))
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
        parser_type = _forced_parser(body, tokenizer, config)
        return lambda: AnswerReader(None, parser_type(schemas, eager=True), max_calls=single)
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
    if forced(body):
        tags = [opening.marker for opening in _forced_parser(body, tokenizer, config)().openings()]
    elif has_format(body):
        return False
    else:
        functions = offered(body)
        template = tokenizer.chat_template_source(tools=bool(functions))
        tags = thought_tags(template)
        if functions:
            tags += [opening.marker for opening in _parser(template, config)().openings()]
    special = tokenizer.special_token_ids
    return any(tokenizer.token_id(tag) in special for tag in tags)


def _forced_parser(
    body: ChatRequest, tokenizer: Tokenizer, config: ServerConfig
) -> type[ToolParser]:
    """The parser of forced calls: the family's, or that of a JSON list."""
    has_form = _own_block(body, forced(body), tokenizer, config, 1) is not None
    parser = _find_parser(tokenizer.chat_template_source(tools=True), config)
    return parser if has_form and parser is not None else ForcedParser


def _find_parser(template: str, config: ServerConfig) -> type[ToolParser] | None:
    name = config.tool_parser
    return choose_parser(template) if name is None else PARSERS[name]


def _require_tools(template: str) -> None:
    if "tools" not in template:
        raise _invalid(
            "this model's chat template shows no tools: leave tools out, or serve a model that "
            "was trained with tools",
            "tools",
        )


def _parser(template: str, config: ServerConfig) -> type[ToolParser]:
    _require_tools(template)
    parser = _find_parser(template, config)
    if parser is None:
        raise _invalid(
            "this model's chat template writes no known form of tool calls: serve it with "
            f"--tool-parser, one of {', '.join(PARSERS)}, or force calls by tool_choice",
            "tools",
        )
    return parser


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
