"""The parts of generating endpoints: limits, deadlines, generations and responses."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol, get_args, runtime_checkable

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from looseleaf.config import Reuse
from looseleaf.sampling_params import SamplingParams
from looseleaf.server.connection import EventStream, until_gone
from looseleaf.server.errors import ApiError
from looseleaf.server.events import Event
from looseleaf.server.generation import Generation
from looseleaf.server.policies import parse_policies
from looseleaf.server.prompts import TokenizedPrompt
from looseleaf.server.protocol.common import GenerationRequest
from looseleaf.server.routes.context import (
    caller_of,
    log_reuse,
    report_error,
    request_id_of,
    service_of,
)
from looseleaf.server.service import Service

_MIN_SECONDS = 0.001

REUSE_HEADER = "X-Looseleaf-Reuse"
"""Prompt tokens of an answer: exact, reused out of context, and computed."""


@runtime_checkable
class Answering(Protocol):
    """The answer to one API request, in the JSON of its API; ``end`` follows its stream."""

    generation: Generation
    end: bytes

    async def whole(self) -> dict[str, Any]:
        """The complete answer."""
        ...

    def chunks(self) -> AsyncGenerator[list[Event], None]:
        """The answer as a stream of the events of each update."""
        ...

    def failure(self, error: ApiError) -> list[Event]:
        """The last events of a stream that failed."""
        ...


def log_user(request: Request, user: str | None) -> None:
    """Add the client's label to the log, also for requests refused later."""
    if user is not None:
        request.state.facts["user"] = user


def check_documents(service: Service, number: int) -> None:
    """Raises ApiError (400) for more documents than the server's limit."""
    limit = service.config.max_documents
    if number > limit:
        raise ApiError(
            400,
            f"the request has {number} documents, above the limit of {limit}: send fewer",
            param="documents",
            code="too_many_documents",
        )


def reuse_level(service: Service, body: GenerationRequest) -> Reuse:
    """The most reuse of a request: the lesser of its own and the server's level.

    Discovery is off for scored prompts, whose documents have no scores, and for APE, which permits
    no text between documents."""
    levels = get_args(Reuse)
    own_level = None if body.looseleaf is None else body.looseleaf.reuse
    level = min(own_level or service.config.reuse, service.config.reuse, key=levels.index)
    selector = body.fuse if body.fuse is None or isinstance(body.fuse, str) else body.fuse.selector
    if level == "discover" and (body.prompt_logprobs is not None or selector == "ape"):
        return "documents"
    return level


def due_of(body: GenerationRequest, service: Service) -> float:
    """The request's deadline, on the loop's clock."""
    limit = service.config.deadline
    seconds = limit if body.deadline is None else min(body.deadline, limit)
    return asyncio.get_running_loop().time() + seconds


def make_generation(
    request: Request,
    body: GenerationRequest,
    prompts: list[TokenizedPrompt],
    params: SamplingParams,
    due: float,
    *,
    shortens: bool = False,
) -> Generation:
    """The generation of a request's prompts. Raises ApiError for prompts above a limit."""
    # tokenization has used a part of the request's time
    seconds = max(round(due - asyncio.get_running_loop().time(), 3), _MIN_SECONDS)
    return Generation(
        service_of(request),
        request_id_of(request),
        caller_of(request).salted(body.cache_salt),
        prompts,
        params,
        seconds,
        parse_policies(body),
        shortens,
    )


def page_of(items: Sequence[dict[str, Any]], limit: int) -> Response:
    """The first ``limit`` of ``items``, each with an id, as a page of a list."""
    data = items[:limit]
    ids = [item["id"] for item in data]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return JSONResponse({"object": "list", "data": data, **ends, "has_more": len(items) > limit})


async def respond(request: Request, answer: Answering, *, stream: bool) -> Response:
    """The response to a request, complete or as a stream."""
    try:
        if not stream:
            content = await until_gone(request.receive, answer.whole())
            return JSONResponse(content, headers={REUSE_HEADER: answer.generation.reuse_header})
        chunks = answer.chunks()
        # errors before the first token can still set the status
        first = await until_gone(request.receive, anext(chunks))
        events = _guarded(first, chunks, request, answer)
        return EventStream(events, {REUSE_HEADER: answer.generation.reuse_header}, answer.end)
    finally:
        if not stream:
            log_reuse(request, answer.generation)


async def _guarded(
    first: list[Event],
    chunks: AsyncGenerator[list[Event], None],
    request: Request,
    answer: Answering,
) -> AsyncGenerator[list[Event], None]:
    """The stream; an error becomes its last event."""
    try:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk
    except Exception as error:
        yield answer.failure(report_error(request, error))
    finally:
        log_reuse(request, answer.generation)
