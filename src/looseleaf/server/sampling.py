"""From a request's fields to `SamplingParams`.

A null field takes its default: first from generation_config.json, then from `SamplingParams`."""

import json
import re
from collections.abc import Mapping
from typing import Any

from looseleaf.errors import InvalidOption
from looseleaf.sampling_params import Grammar, SamplingParams
from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.common import (
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from looseleaf.server.protocol.completion import CompletionRequest
from looseleaf.server.protocol.structured import StructuredOutputs

MAX_STOP_CHARACTERS = 1024

_SHARED_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "seed",
    "skip_special_tokens",
    "prompt_logprobs",
)


def chat_params(
    body: ChatRequest,
    vocab_size: int,
    advice: Mapping[str, Any],
    *,
    tool_grammar: Grammar | None = None,
    shows_markers: bool = False,
) -> SamplingParams:
    """Sampling of a chat request; without a limit an answer may fill the context.

    ``tool_grammar`` replaces the answer's own format. ``shows_markers`` keeps special tokens."""
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _params(
        body,
        vocab_size,
        advice,
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=tool_grammar or _grammar(body),
        **({"skip_special_tokens": False} if shows_markers else {}),
    )


def completion_params(
    body: CompletionRequest, vocab_size: int, advice: Mapping[str, Any]
) -> SamplingParams:
    """Sampling of a completion request; the default limit is 16 tokens, as in OpenAI's API."""
    limit = 16 if body.max_tokens is None else body.max_tokens
    fields = {"max_tokens": limit, "logprobs": body.logprobs, "grammar": _grammar(body)}
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return _params(body, vocab_size, advice, **fields)


def _params(
    body: GenerationRequest, vocab_size: int, advice: Mapping[str, Any], **limits: Any
) -> SamplingParams:
    values = {name: getattr(body, name) for name in _SHARED_FIELDS}
    options = {**advice, **{name: value for name, value in values.items() if value is not None}}
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise _invalid("stop", f"a stop string has at most {MAX_STOP_CHARACTERS} characters")
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    for name, ids in (("logit_bias", bias), ("stop_token_ids", body.stop_token_ids or ())):
        beyond = [token for token in ids if not 0 <= token < vocab_size]
        if beyond:
            raise _invalid(
                name, f"token id {beyond[0]} is outside the model's vocabulary of {vocab_size}"
            )
    if any(abs(value) > 100 for value in bias.values()):
        raise _invalid("logit_bias", "values must be from -100 to 100")
    try:
        return SamplingParams(**{**options, **limits, "logit_bias": bias})
    except InvalidOption as error:
        message = error.named(lambda option: _field_of(body, option))
        raise ApiError(400, message, code="invalid_value") from error


def _field_of(body: GenerationRequest, option: str) -> str:
    """The field of ``body`` that sets an option of `SamplingParams`."""
    renamed = {"max_tokens": "max_completion_tokens"}.get(option, option)
    return renamed if getattr(body, renamed, None) is not None else option


def _grammar(body: GenerationRequest) -> Grammar | None:
    response_format, structured = body.response_format, body.structured_outputs
    if isinstance(response_format, JsonObjectFormat):
        return Grammar.json_object()
    if isinstance(response_format, JsonSchemaFormat):
        named = response_format.json_schema
        if named.schema_ is None:
            return Grammar.json_object()
        return Grammar.json_schema(named.schema_, strict=bool(named.strict))
    if structured is not None and structured.json_object:
        return Grammar.json_object()
    named_fields = StructuredOutputs.model_construct(
        json_=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )
    return _structured(named_fields if structured is None else structured)


def _structured(structured: StructuredOutputs) -> Grammar | None:
    if structured.json_ is not None:
        return Grammar.json_schema(_read_schema(structured.json_))
    if structured.regex is not None:
        return Grammar.regex(structured.regex)
    if structured.choice is not None:
        return Grammar.regex("|".join(map(re.escape, structured.choice)))
    return None if structured.grammar is None else Grammar.lark(structured.grammar)


def _read_schema(schema: dict[str, Any] | str) -> dict[str, Any] | bool:
    if not isinstance(schema, str):
        return schema
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise _invalid("structured_outputs", f"the JSON schema is not JSON: {error}") from error
    if not isinstance(value, dict | bool):
        raise _invalid("structured_outputs", "a JSON schema is an object, true or false")
    return value


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
