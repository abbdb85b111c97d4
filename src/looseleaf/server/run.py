"""A server process: listen, tell that it is there, and end without cutting anybody off."""

import asyncio
import gc
import math
import socket
from types import FrameType

import uvicorn

from looseleaf.errors import InvalidOption
from looseleaf.server.app import make_app
from looseleaf.server.logs import taking_over
from looseleaf.server.service import Service
from looseleaf.server.stalled import Connection

_CLOSING_SECONDS = 5
"""After the drain, for what has been cut to be told so."""


class Server(uvicorn.Server):
    """Refuses new requests from the moment a signal asks it to end, and finishes those it has."""

    def __init__(self, service: Service) -> None:
        config = service.config
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=Connection,
                host=config.host,
                port=config.port,
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=math.ceil(config.drain_seconds) + _CLOSING_SECONDS,
                timeout_keep_alive=30,
                backlog=2048,
            )
        )
        self.service = service

    @property
    def bound_port(self) -> int:
        """The port that it listens at; known once it has started."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await self.service.start()
        await super().startup(sockets=sockets)  # type: ignore[arg-type]
        if self.started:
            host = self.service.config.host
            shown = f"[{host}]" if ":" in host else host
            self.service.log.info("listening", url=f"http://{shown}:{self.bound_port}/")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        limit = asyncio.create_task(self._cut_off(self.service.begin_to_end()))
        try:
            await super().shutdown(sockets=sockets)
        finally:
            limit.cancel()

    async def _cut_off(self, seconds: float) -> None:
        """When the drain has run out, end what still runs while its callers can be told of it."""
        await asyncio.sleep(seconds)
        await self.service.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.begin_to_end()
        super().handle_exit(sig, frame)


def require_free(host: str, port: int) -> None:
    """Raises InvalidOption for an address that can't be listened at now; to be asked before a model
    is loaded for it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as tried:
            # as the server will: connections that have just ended are in nobody's way
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise InvalidOption(
            f"nothing can listen at {host}, port {port} ({error.strerror}): give another --port, "
            "0 for a free one, or another --host"
        ) from error


def serve(service: Service) -> None:
    """Serve until SIGTERM or SIGINT; a second SIGINT does not wait for what runs."""
    server = Server(service)
    gc.collect()
    # weights, graphs and modules stay: the collector would stop all answers to look through them
    gc.freeze()
    service.log.info(
        "loaded",
        models=list(service.models),
        max_model_len=service.llm.engine.max_model_len,
        tenants=len(service.keys.tenants),
    )
    try:
        # who is told not to wait cuts requests off, and need not hear of each by a traceback
        with taking_over(service.log, lambda: server.force_exit):
            server.run()
    except KeyboardInterrupt:
        # raised anew when all has ended as it was asked to
        if not server.should_exit:
            raise
    finally:
        if server.force_exit:
            service.log.info("stopped", whole=False)
        service.llm.close()
        gc.unfreeze()
