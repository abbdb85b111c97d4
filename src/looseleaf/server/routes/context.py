"""What every endpoint needs of its request: the service, who calls, and the request's id."""

from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from looseleaf.errors import LimitExceeded
from looseleaf.server.errors import ApiError, as_api_error
from looseleaf.server.generation import Generation
from looseleaf.server.keys import Caller
from looseleaf.server.service import Service

_BEARER = HTTPBearer(auto_error=False, description="An API key; needed where the server has any.")


def service_of(request: Request) -> Service:
    """The service that the application was made for."""
    service: Service = request.app.state.service
    return service


def caller_of(request: Request) -> Caller:
    """Who calls, as the gate found out."""
    caller: Caller = request.state.caller
    return caller


def request_id_of(request: Request) -> str:
    """The id that this request has in answers and in the log."""
    request_id: str = request.state.request_id
    return request_id


def note(request: Request, generation: Generation) -> None:
    """Facts about a request for its line in the log and for its trace."""
    outputs = generation.latest
    if not outputs:
        return
    reuse = [output.reuse for output in outputs]
    request.state.facts.update(
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        output_tokens=sum(len(one.token_ids) for output in outputs for one in output.outputs),
        text_tokens_cached=sum(r.text_tokens_cached for r in reuse),
        document_tokens_reused=sum(r.document_tokens_reused for r in reuse),
        document_tokens_computed=sum(r.document_tokens_computed for r in reuse),
        document_tokens_recomputed=sum(r.document_tokens_recomputed for r in reuse),
        first_token=outputs[0].metrics.first_token,
    )


def tell(request: Request, error: Exception) -> ApiError:
    """What the caller hears of an error; the log gets its code, and the whole of a fault."""
    told = as_api_error(error, request_id_of(request))
    request.state.facts["code"] = told.code
    if isinstance(error, LimitExceeded):
        service_of(request).metrics.limits.labels(error.what).inc()
    if told.status_code == 500:
        service = service_of(request)
        service.metrics.faults.inc()
        service.log.error("fault", request_id=request_id_of(request), exc_info=error)
    return told


async def _the_service(request: Request) -> Service:
    # as a coroutine, for others are called in a thread
    return service_of(request)


async def _the_caller(request: Request) -> Caller:
    return caller_of(request)


TheService = Annotated[Service, Depends(_the_service)]
TheCaller = Annotated[Caller, Depends(_the_caller)]
KEYED = [Security(_BEARER)]
"""Marks endpoints that need a key, for the API's description; the gate has checked it."""
