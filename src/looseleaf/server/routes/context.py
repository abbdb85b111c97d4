"""Request state that all endpoints use: the service, the caller, and the request id."""

from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from looseleaf.errors import LimitExceeded
from looseleaf.server.errors import ApiError, as_api_error
from looseleaf.server.generation import Generation
from looseleaf.server.keys import Caller
from looseleaf.server.service import Service

_BEARER = HTTPBearer(
    auto_error=False, description="An API key, required by servers that have keys."
)


def service_of(request: Request) -> Service:
    """The application's service."""
    service: Service = request.app.state.service
    return service


def caller_of(request: Request) -> Caller:
    """The caller that the gate identified."""
    caller: Caller = request.state.caller
    return caller


def request_id_of(request: Request) -> str:
    """The request's id in answers and in the log."""
    request_id: str = request.state.request_id
    return request_id


def log_reuse(request: Request, generation: Generation) -> None:
    """Add token counts to the request's line in the log and to its trace."""
    outputs = generation.latest
    if not outputs:
        return
    reuse = [output.reuse for output in outputs]
    request.state.facts.update(
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        output_tokens=sum(len(c.token_ids) for output in outputs for c in output.outputs),
        text_tokens_cached=sum(r.text_tokens_cached for r in reuse),
        document_tokens_reused=sum(r.document_tokens_reused for r in reuse),
        document_tokens_computed=sum(r.document_tokens_computed for r in reuse),
        document_tokens_recomputed=sum(r.document_tokens_recomputed for r in reuse),
        first_token=outputs[0].metrics.first_token,
    )


def report_error(request: Request, error: Exception) -> ApiError:
    """The response for an error; its code goes to the log, a fault with its traceback."""
    service, response = service_of(request), as_api_error(error, request_id_of(request))
    request.state.facts["code"] = response.code
    if isinstance(error, LimitExceeded):
        service.metrics.limits.labels(error.what).inc()
    if response.status_code == 500:
        service.metrics.faults.inc()
        service.log.error("fault", request_id=request_id_of(request), exc_info=error)
    return response


async def _the_service(request: Request) -> Service:
    # FastAPI runs plain functions in a thread
    return service_of(request)


async def _the_caller(request: Request) -> Caller:
    return caller_of(request)


TheService = Annotated[Service, Depends(_the_service)]
TheCaller = Annotated[Caller, Depends(_the_caller)]
KEYED = [Security(_BEARER)]
"""Marks endpoints with a key in the OpenAPI document; the gate checks the key."""
