"""Errors as OpenAI's clients know them: a status, and ``{"error": {message, type, param, code}}``.

A client error says what to change. A server error says only its id; the log has the rest."""

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


class ApiError(HTTPException):
    """A refusal with its status; ``param`` names the field at fault, ``code`` the reason."""

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
        """The JSON object that clients get."""
        kind = _KINDS.get(
            self.status_code,
            "server_error" if self.status_code >= 500 else "invalid_request_error",
        )
        # text from a request may hold what can't be sent back, such as half of a surrogate pair
        message = str(self.detail).encode("utf-8", "replace").decode()
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The same as an HTTP response."""
        return JSONResponse(self.body, self.status_code, dict(self.headers or {}))


class ClientGone(Exception):
    """The caller has closed the connection: nobody waits for an answer."""


def busy(message: str, retry_after: float, code: str = "rate_limit_exceeded") -> ApiError:
    """A 429 that says after how many seconds to try again."""
    return ApiError(
        429, message, code=code, headers={"Retry-After": str(max(1, math.ceil(retry_after)))}
    )


def unavailable(message: str, code: str) -> ApiError:
    """A 503: not ready yet, or ready no more."""
    return ApiError(503, message, code=code, headers={"Retry-After": "1"})


def fault(request_id: str) -> ApiError:
    """A 500 that the log explains under the same id."""
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

_ONCE = {status: {"x-should-retry": "false"} for status in (408, 409)}
"""Headers that keep OpenAI's clients from asking again, which they do after these: the same request
in the same time would end the same way."""


_OF_SERVER = frozenset(
    one.name
    for section in (EngineConfig, CacheConfig, SchedulerConfig, TierConfig)
    for one in fields(section)
) - {one.name for one in fields(SamplingParams)}


def as_field(option: str) -> str:
    """An option of the library as clients know it: a field of bodies, or a flag of the server."""
    return f"the server's --{option.replace('_', '-')}" if option in _OF_SERVER else option


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """What a client is told about ``error``; whatever is not known to be its fault is a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineClosed):
        return unavailable("the server is shutting down: ask again in a moment", "shutting_down")
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            message = error.named(as_field)
            return ApiError(status, message, code=code, headers=_ONCE.get(status))
    return fault(request_id)


_NOTHING = object()


def _step_into(value: Any, step: str | int) -> Any:
    if isinstance(value, Mapping):
        return value.get(step, _NOTHING)
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return value[step]
    return _NOTHING


def _path(error: Any, body: Any) -> list[str]:
    """Where in the body an error is, or which part of the address is wrong. Pydantic mixes names
    and tags of a union's members into its paths; only what is in the body is kept, and the name of
    what should be there."""
    steps = error["loc"][1:]
    if error["loc"][0] in ("path", "query"):
        return [str(step) for step in steps]
    path = _found(body, steps)[1]
    if error["type"] == "missing" and steps:
        path.append(str(steps[-1]))
    return path


def _found(value: Any, steps: Sequence[str | int]) -> tuple[bool, list[str]]:
    """The steps that lead into ``value``, and whether the last is one of them; where a tag is the
    name of a field, too, those that lead on."""
    if not steps:
        return False, []
    step, later = steps[0], steps[1:]
    without = _found(value, later)
    inner = _step_into(value, step)
    if inner is _NOTHING:
        return without
    last, path = _found(inner, later)
    taken = last or not later, [str(step)[:80], *path]
    return max(taken, without, key=lambda found: (found[0], len(found[1])))


def describe_invalid(errors: Sequence[Any], body: Any) -> ApiError:
    """What pydantic found wrong, as one sentence with the field's path; of several errors the one
    that reaches deepest, which is that of the right member of a union, and of those one that says
    what is not here. A list that is too long was right in all that was looked at."""

    def telling(one: Any) -> tuple[bool, int, bool]:
        return one["type"] == "too_long", len(_path(one, body)), one["type"] == "value_error"

    error = max(errors, key=telling)
    path = _path(error, body)
    param = ".".join(path) or None
    # every member of a union says what it would have taken here
    members = [one for one in errors if one["type"] in _RULES and _path(one, body) == path]
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
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "literal_error": "{expected}",
}
"""What a field must be, by the type of pydantic's error."""

_MOST_GIVEN = 40
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
        return f"{where} asks for what is not here: leave it out, or send null"
    if kind == "union_tag_invalid":
        name, tags = str(context["discriminator"]).strip("'"), context["expected_tags"]
        told = _as_json(" or ".join(tags.split(", ")))
        return f"{where}.{name} must be {told}, not {_given(error['input'].get(name))}"
    if kind == "union_tag_not_found":
        return f"{where} has no field {context['discriminator']}: add it"
    if kind in _RULES:
        rules = " or ".join(dict.fromkeys(map(_rule, members)))
        return f"{where} must be {rules}, not {_given(error['input'])}"
    message = error["msg"]
    return f"{where}: {message[0].lower()}{message[1:]}"


def _rule(error: Any) -> str:
    context = {n: shown(v) if isinstance(v, float) else v for n, v in error.get("ctx", {}).items()}
    if "expected" in context:
        context["expected"] = _as_json(context["expected"])
    return _RULES[error["type"]].format_map(context)


def _as_json(words: str) -> str:
    """The values that pydantic lists, as JSON writes them."""
    return _WORDS.get(words, words).replace("'", '"')


def _given(value: Any) -> str:
    """What a body has in place of what it should have: as JSON, in short."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_GIVEN else f"{text[:_MOST_GIVEN]}…"
