"""A server process: listen, tell that it is there, and end without cutting anybody off."""

import asyncio
import gc
import os
import signal
import socket
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType

import uvicorn

from looseleaf.errors import InvalidOption
from looseleaf.server.app import make_app
from looseleaf.server.logs import taking_over
from looseleaf.server.open_connections import OpenConnections, raise_descriptor_limit, room
from looseleaf.server.service import STEP_PATIENCE, Service
from looseleaf.server.stalled import Connection

EXIT_BROKEN = 4
"""Exit status of a server whose engine broke, or stood still to the end."""

EXIT_CUT = 5
"""Exit status of a server that ended as it was told to, but cut requests off."""

_CLOSING_SECONDS = 5
"""After the drain, for connections to close and for what has been cut to be told so."""


class Server(uvicorn.Server):
    """Refuses new requests from the moment a signal asks it to end, and finishes those it has."""

    def __init__(self, service: Service) -> None:
        config = service.config
        most, backlog = room(config.max_connections)
        self.places = OpenConnections(most, service.metrics.refused_connections.inc)
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=partial(Connection, places=self.places),  # type: ignore[arg-type]
                host=config.host,
                port=config.port,
                # a connection that changed its protocol would no longer be one of ours
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=_CLOSING_SECONDS,
                timeout_keep_alive=30,
                backlog=backlog,
            )
        )
        self.service = service
        self._was_asked = False

    @property
    def bound_port(self) -> int:
        """The port that it listens at; known once it has started."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await self.service.start()
        if self.service.draining:
            # asked to end before it has begun
            return
        await super().startup(sockets=sockets)  # type: ignore[arg-type]
        if self.started:
            host = self.service.config.host
            shown = f"[{host}]" if ":" in host else host
            threads = self.service.llm.engine.threads
            about = {} if threads is None else {"threads": str(threads)}
            self.service.log.info("listening", url=f"http://{shown}:{self.bound_port}/", **about)

    async def on_tick(self, counter: int) -> bool:
        if self.service.llm.fault is not None:
            # nothing is served any more: whoever starts servers is to start another one
            self.service.begin_to_end()
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end while probes and scrapes are still answered, and new requests refused;
        then close the port."""
        seconds = self.service.begin_to_end()
        self.service.log.info("ending", seconds=round(seconds, 1), under_way=self.service.under_way)
        ending = asyncio.create_task(self.service.stop())
        while not ending.done() and not self.force_exit:
            await asyncio.wait({ending}, timeout=0.1)
        if self.force_exit:
            self.config.timeout_graceful_shutdown = 0
        await super().shutdown(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. A second SIGTERM or SIGINT does not wait for what runs; SIGHUP, which may
        come along with either, always does."""
        self.service.begin_to_end()
        self.should_exit = True
        if sig != signal.SIGHUP:
            self.force_exit, self._was_asked = self._was_asked, True

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        # uvicorn's own would end the process by the signal, before the last line of the log
        return nullcontext()


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


def serve(service: Service) -> int:
    """Serve until a signal asks for the end or the engine breaks; the exit status, with which the
    process is to end: further signals change nothing any more."""
    raise_descriptor_limit()
    server = Server(service)
    gc.collect()
    # weights, graphs and modules stay: the collector would stop all answers to look through them
    gc.freeze()
    service.log.info(
        "loaded",
        models=list(service.models),
        max_model_len=service.llm.engine.max_model_len,
        tenants=len(service.keys.tenants),
        max_connections=server.places.most,
    )
    for one in _heeded():
        signal.signal(one, server.handle_exit)
    try:
        # who is told not to wait cuts requests off, and need not hear of each by a traceback
        with taking_over(service.log, lambda: server.force_exit):
            server.run()
    finally:
        status = _end(server)
        # the interpreter takes a while to end, and a signal would take the place of the status
        for one in _heeded():
            signal.signal(one, signal.SIG_IGN)
        gc.unfreeze()
    return status


def _end(server: Server) -> int:
    """Let go of the engine, and say how it ended: the exit status, and the log's last line."""
    service = server.service
    came_back = service.llm.close(STEP_PATIENCE if service.whole is None else 0.0)
    whole = came_back and service.whole is not False and not server.force_exit
    broken = service.llm.fault is not None or not came_back
    service.log.info("stopped", whole=whole and not broken)
    service.log_writer.close()
    status = EXIT_BROKEN if broken else 0 if whole else EXIT_CUT
    if not came_back:
        # a thread that stands still would keep the interpreter from ending
        os._exit(status)
    return status


def _heeded() -> list[signal.Signals]:
    """The signals that end a server. Who ignores SIGHUP was started to outlive a terminal."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if outlives else [signal.SIGHUP])]
