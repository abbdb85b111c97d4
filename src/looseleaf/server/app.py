"""The ASGI application: routes and error handlers inside the gate."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from looseleaf import __version__
from looseleaf.errors import LooseleafError
from looseleaf.server.errors import ApiError, describe_invalid
from looseleaf.server.gate import Gate
from looseleaf.server.registering import register_again
from looseleaf.server.routes import documents, generate, messages, responses
from looseleaf.server.routes import service as service_routes
from looseleaf.server.routes.context import report_error
from looseleaf.server.service import Service

DESCRIPTION = """The APIs of OpenAI and Anthropic, with documents as part of the request.

A document is computed once and read at any position, by any number of requests. The `looseleaf`
object of every answer reports reused and computed tokens."""


def make_app(service: Service) -> ASGIApp:
    """The ASGI application of a started service; its shutdown drains running requests."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        registration = None
        if service.restores:
            registration = asyncio.create_task(register_again(service))
        yield
        if registration is not None:
            registration.cancel()
        try:
            await service.stop()
        finally:
            service.tracer.close()

    app = FastAPI(
        title="Looseleaf",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    routes = [*app.routes]
    for router in (
        generate.router,
        messages.router,
        responses.router,
        documents.router,
        service_routes.keyed,
        service_routes.open_router,
    ):
        app.include_router(router)
        routes += router.routes
    for kind in (ApiError, RequestValidationError, HTTPException, LooseleafError):
        app.add_exception_handler(kind, _handle)
    gate = Gate(app, service, routes)
    origins = service.config.cors_origins
    return _with_cors(gate, origins) if origins else gate


def _with_cors(gate: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``gate`` for web pages of ``origins``; browsers ask for permission without a key."""
    return CORSMiddleware(
        gate,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "X-Looseleaf-Warning", "X-Looseleaf-Reuse", "Retry-After"],
    )


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        error = describe_invalid(error.errors(), error.body)
    elif isinstance(error, HTTPException) and not isinstance(error, ApiError):
        error = _framework_error(error, request.url.path[:80])
    return report_error(request, error).response(request.url.path)


def _framework_error(error: HTTPException, path: str) -> ApiError:
    """The framework's own errors: unknown paths and methods."""
    known = {
        404: (f"there is no path {path}: GET /docs lists all paths", "not_found"),
        405: (f"{path} does not take this method: GET /docs lists its methods", "wrong_method"),
    }
    message, code = known.get(error.status_code, (str(error.detail), "invalid_request"))
    headers = error.headers or {}
    return ApiError(error.status_code, message, code=code, headers=headers)
