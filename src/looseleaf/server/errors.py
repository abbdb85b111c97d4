"""Errors in OpenAI's form: a status, and ``{"error": {message, type, param, code}}``.

Below ``/v1/messages`` they have Anthropic's form, with the same param and code.

A client error says what to change. A server error names the request id; the log has the cause."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from looseleaf.config import CacheConfig, EngineConfig, SchedulerConfig, TierConfig
from looseleaf.config.option import shown
from looseleaf.errors import (
    DeadlineExceeded,
    DocumentExists,
    DocumentNotFound,
    EngineClosed,
    EngineLost,
    InvalidOption,
    InvalidRequest,
    LimitExceeded,
    LooseleafError,
    PoolTooSmall,
    PromptTooLong,
    TooManyDocuments,
)
from looseleaf.sampling_params import SamplingParams

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}

MESSAGES_PATH = "/v1/messages"

_ANTHROPIC_KINDS = {
    **_KINDS,
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def is_messages_path(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


class ApiError(HTTPException):
    """An error response; ``param`` is the field at fault, ``code`` the reason."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = _KINDS.get(
            self.status_code,
            "server_error" if self.status_code >= 500 else "invalid_request_error",
        )
        # text from a request may contain half surrogates, which UTF-8 can't encode
        message = str(self.detail).encode("utf-8", "replace").decode()
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body_for(self, path: str) -> dict[str, Any]:
        """The JSON object of a response at a path, in the form of its API."""
        if not is_messages_path(path):
            return self.body
        error = {**self.body["error"], "type": self._anthropic_kind}
        return {"type": "error", "error": error}

    @property
    def _anthropic_kind(self) -> str:
        known = _ANTHROPIC_KINDS.get(self.status_code)
        return known or ("api_error" if self.status_code >= 500 else "invalid_request_error")

    def response(self, path: str) -> JSONResponse:
        """The HTTP response at a path."""
        return JSONResponse(self.body_for(path), self.status_code, dict(self.headers or {}))


class ClientGone(Exception):
    """The client has closed the connection."""


def busy(message: str, retry_after: float, code: str = "rate_limit_exceeded") -> ApiError:
    """A 429 with ``Retry-After`` in seconds."""
    return ApiError(
        429, message, code=code, headers={"Retry-After": str(max(1, math.ceil(retry_after)))}
    )


def unavailable(message: str, code: str) -> ApiError:
    """A 503 with ``Retry-After``."""
    return ApiError(503, message, code=code, headers={"Retry-After": "1"})


def fault(request_id: str) -> ApiError:
    """A 500 with the id of its entry in the log."""
    return ApiError(
        500,
        f"the server failed on this request; its log says why under the id {request_id}",
        code="internal_error",
    )


_STATUSES: Sequence[tuple[type[LooseleafError], int, str]] = (
    (PromptTooLong, 400, "context_length_exceeded"),
    (PoolTooSmall, 400, "pool_too_small"),
    (DocumentNotFound, 404, "document_not_found"),
    (DocumentExists, 409, "document_exists"),
    (TooManyDocuments, 400, "too_many_documents"),
    (LimitExceeded, 400, "limit_exceeded"),
    (InvalidRequest, 400, "invalid_request"),
    (InvalidOption, 400, "invalid_value"),
    (DeadlineExceeded, 408, "deadline_exceeded"),
)

_NO_RETRY = {status: {"x-should-retry": "false"} for status in (408, 409)}
"""OpenAI's clients retry these statuses by default, though the same request would fail again."""


_SERVER_OPTIONS = frozenset(
    option.name
    for section in (EngineConfig, CacheConfig, SchedulerConfig, TierConfig)
    for option in fields(section)
) - {param.name for param in fields(SamplingParams)}


def as_field(option: str) -> str:
    """A library option in the client's terms: a field of bodies, or a flag of the server."""
    return f"the server's --{option.replace('_', '-')}" if option in _SERVER_OPTIONS else option


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """The response for ``error``: 500 unless the error is known to be the client's."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineLost):
        return unavailable(str(error), "engine_lost")
    if isinstance(error, EngineClosed):
        return unavailable("the server is shutting down: ask again in a moment", "shutting_down")
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            message = error.named(as_field)
            return ApiError(status, message, code=code, headers=_NO_RETRY.get(status))
    return fault(request_id)


_MISSING = object()


def _step_into(value: Any, step: str | int) -> Any:
    if isinstance(value, Mapping):
        return value.get(step, _MISSING)
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return value[step]
    return _MISSING


def _path(error: Any, body: Any) -> list[str]:
    """The path of an error in the body, or the URL parameter at fault.

    Pydantic's paths contain names of union members; only steps that exist in the body remain."""
    steps = error["loc"][1:]
    if error["loc"][0] in ("path", "query"):
        return [str(step) for step in steps]
    path = _body_path(body, steps)[1]
    if error["type"] == "missing" and steps:
        path.append(str(steps[-1]))
    return path


def _body_path(value: Any, steps: Sequence[str | int]) -> tuple[bool, list[str]]:
    """The longest subsequence of ``steps`` that exists in ``value``, and whether it ends last."""
    if not steps:
        return False, []
    step, later = steps[0], steps[1:]
    without_step = _body_path(value, later)
    inner = _step_into(value, step)
    if inner is _MISSING:
        return without_step
    ends_last, path = _body_path(inner, later)
    with_step = ends_last or not later, [str(step)[:80], *path]
    return max(with_step, without_step, key=lambda match: (match[0], len(match[1])))


def describe_invalid(errors: Sequence[Any], body: Any) -> ApiError:
    """A 400 with one sentence for pydantic's most specific error, and the field's path.

    A deeper path belongs to the intended member of a union. Errors of list lengths come first."""

    def specificity(error: Any) -> tuple[bool, int, bool]:
        return error["type"] == "too_long", len(_path(error, body)), error["type"] == "value_error"

    error = max(errors, key=specificity)
    path = _path(error, body)
    param = ".".join(path) or None
    # every member of a union contributes its own rule
    members = [e for e in errors if e["type"] in _RULES and _path(e, body) == path]
    message = _sentence(error, members, param)
    return ApiError(400, message[:500], param=param, code="invalid_value")


_RULES: Mapping[str, str] = {
    **{"string_type": "a string", "string_sub_type": "a string", "string_unicode": "Unicode text"},
    **{"int_type": "a whole number", "int_from_float": "a whole number"},
    **{"int_parsing": "a whole number", "int_parsing_size": "a whole number of fewer digits"},
    **{"float_type": "a number", "float_parsing": "a number", "finite_number": "a finite number"},
    **{"bool_type": "true or false", "bool_parsing": "true or false"},
    **{"list_type": "a list", "dict_type": "an object"},
    **{"model_type": "an object", "model_attributes_type": "an object"},
    **{"greater_than": "above {gt}", "greater_than_equal": "at least {ge}"},
    **{"less_than": "below {lt}", "less_than_equal": "at most {le}"},
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "string_pattern_mismatch": "of the form {pattern}",
    "too_short": "a list of {min_length} or more items",
    "too_long": "a list of {max_length} or fewer items",
    "literal_error": "{expected}",
}
"""The rule of a field, by the type of pydantic's error."""

_MAX_EXCERPT = 40
_WORDS = {"None": "null", "False": "false", "True": "true"}


def _sentence(error: Any, members: Sequence[Any], param: str | None) -> str:
    kind, context, where = error["type"], error.get("ctx", {}), param or "the body"
    if kind == "extra_forbidden":
        return f"unknown field {param!r}: leave it out, or check its spelling"
    if kind == "missing":
        return f"{where} is missing: add it"
    if kind == "value_error":
        return str(context["error"])
    if kind == "none_required":
        return f"{where} is not supported: leave it out, or send null"
    if kind == "union_tag_invalid":
        name, tags = str(context["discriminator"]).strip("'"), context["expected_tags"]
        choices = _as_json(" or ".join(tags.split(", ")))
        return f"{where}.{name} must be {choices}, not {_excerpt(error['input'].get(name))}"
    if kind == "union_tag_not_found":
        return f"{where} has no field {context['discriminator']}: add it"
    if kind in _RULES:
        rules = " or ".join(dict.fromkeys(map(_rule, members)))
        return f"{where} must be {rules}, not {_excerpt(error['input'])}"
    message = error["msg"]
    return f"{where}: {message[0].lower()}{message[1:]}"


def _rule(error: Any) -> str:
    context = {n: shown(v) if isinstance(v, float) else v for n, v in error.get("ctx", {}).items()}
    if "expected" in context:
        context["expected"] = _as_json(context["expected"])
    return _RULES[error["type"]].format_map(context)


def _as_json(words: str) -> str:
    """Pydantic's list of values, in JSON syntax."""
    return _WORDS.get(words, words).replace("'", '"')


def _excerpt(value: Any) -> str:
    """A short JSON form of a wrong value."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_EXCERPT else f"{text[:_MAX_EXCERPT]}…"
