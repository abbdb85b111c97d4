"""The ingress: the proxy of `looseleaf.proxy` as a deployment, with Ray's replicas behind it."""

import asyncio
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Receive, Scope, Send

from looseleaf.config.route import RouteConfig
from looseleaf.proxy.app import ProxyApp
from looseleaf.proxy.forwarder import Forwarder
from looseleaf.proxy.metrics import ProxyMetrics
from looseleaf.proxy.registered import RegisteredBodies
from looseleaf.ray.fleet import RayFleet
from looseleaf.server.limits import KeyLimits

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]


class Relay(Response):
    """A response that an ASGI application writes."""

    def __init__(self, app: ProxyApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_once(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Ray's own proxy adds this header
                headers = [(n, v) for n, v in message["headers"] if n.lower() != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_once)


def make_ingress() -> Any:
    """The ingress deployment."""
    api = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @serve.deployment(name="Ingress")
    @serve.ingress(api)
    class Ingress:
        """Answers clients; each replica of it counts rate limits by itself."""

        def __init__(self, engines: DeploymentHandle, options: dict[str, Any]) -> None:
            config = RouteConfig(**options)
            log = structlog.get_logger()
            self._fleet = RayFleet(engines, log)
            self._opening: asyncio.Task[None] | None = None
            registered = RegisteredBodies(int(config.registered_mib * 2**20))
            self._app = ProxyApp(
                Forwarder(self._fleet, registered, ProxyMetrics()),
                KeyLimits(config.requests_per_minute, config.concurrent_requests),
                int(config.max_body_mib * 2**20),
                log,
            )

        @api.api_route("/{path:path}", methods=METHODS)
        async def answer(self, request: Request) -> Response:
            """Any path of the server's API."""
            if self._opening is None:
                self._opening = asyncio.create_task(self._fleet.open())
            # a client that leaves does not end it for the others
            await asyncio.shield(self._opening)
            return Relay(self._app)

    return Ingress
