"""The server process: listen, log the address, and shut down gracefully."""

import asyncio
import gc
import os
import signal
import socket
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType

import uvicorn

from looseleaf.server.app import make_app
from looseleaf.server.logs import forward_logging
from looseleaf.server.open_connections import (
    OpenConnections,
    connection_capacity,
    raise_descriptor_limit,
)
from looseleaf.server.ports import address_fields
from looseleaf.server.service import STEP_PATIENCE, Service
from looseleaf.server.stalled import Connection

EXIT_BROKEN = 4
"""Exit status of a server whose engine failed, or was stuck until the end."""

EXIT_CUT = 5
"""Exit status of a shutdown that cut off requests."""

_CLOSING_SECONDS = 5
"""Time limit after the drain for connections to close."""


class Server(uvicorn.Server):
    """Drains on a signal: refuses new requests and finishes running requests."""

    def __init__(self, service: Service, num_processes: int = 1) -> None:
        config = service.config
        # processes that share a port share its connections
        most = -(-config.max_connections // num_processes)
        capacity, backlog = connection_capacity(most)
        self.connections = OpenConnections(capacity, service.metrics.refused_connections.inc)
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=partial(Connection, connections=self.connections),  # type: ignore[arg-type]
                host=config.host,
                port=config.port,
                # a protocol upgrade would replace `Connection` and its timeouts
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=_CLOSING_SECONDS,
                timeout_keep_alive=30,
                backlog=backlog,
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
            )
        )
        self.service = service
        self._signalled = False

    @property
    def bound_port(self) -> int:
        """The listening port, known after startup."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await self.service.start()
        if self.service.draining:
            return
        await super().startup(sockets=sockets)  # type: ignore[arg-type]
        if self.started:
            self.announce()

    def announce(self) -> None:
        """Report that the port is open."""
        threads = self.service.llm.facts.threads
        config = self.service.config
        encrypted = config.tls_cert is not None
        fields = address_fields(config.host, self.bound_port, threads, encrypted=encrypted)
        self.service.log.info("listening", **fields)

    async def on_tick(self, counter: int) -> bool:
        if self.service.llm.fault is not None:
            # a supervisor restarts the server after exit
            self.service.begin_shutdown()
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain while the port still answers probes and scrapes, then close the port."""
        seconds = self.service.begin_shutdown()
        self.service.log.info("ending", seconds=round(seconds, 1), under_way=self.service.under_way)
        drain = asyncio.create_task(self.service.stop())
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=0.1)
        if self.force_exit:
            self.config.timeout_graceful_shutdown = 0
        await super().shutdown(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin shutdown. A second SIGTERM or SIGINT skips the drain; SIGHUP never does."""
        self.service.begin_shutdown()
        self.should_exit = True
        if sig != signal.SIGHUP:
            self.force_exit, self._signalled = self._signalled, True

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        # uvicorn's own handlers end the process before the log's last line
        return nullcontext()


def log_loaded(server: Server) -> None:
    """Log the models and limits of a server."""
    service = server.service
    service.log.info(
        "loaded",
        models=list(service.models),
        max_model_len=service.llm.facts.max_model_len,
        tenants=len(service.keys.tenants),
        max_connections=server.connections.capacity,
    )


def serve(service: Service) -> int:
    """Serve until a signal or an engine failure; the exit status. Later signals are ignored."""
    raise_descriptor_limit()
    server = Server(service)
    gc.collect()
    # weights, graphs and modules are permanent; collecting them would pause all answers
    gc.freeze()
    log_loaded(server)
    for number in _shutdown_signals():
        signal.signal(number, server.handle_exit)
    try:
        # a forced exit would log a traceback for every request
        with forward_logging(service.log, lambda: server.force_exit):
            server.run()
    finally:
        status = _end(server)
        # a signal during interpreter shutdown would replace the exit status
        for number in _shutdown_signals():
            signal.signal(number, signal.SIG_IGN)
        gc.unfreeze()
    return status


def _end(server: Server) -> int:
    """Close the engine and log the last line; the exit status."""
    service = server.service
    closed = service.llm.close(STEP_PATIENCE if service.whole is None else 0.0)
    whole = closed and service.whole is not False and not server.force_exit
    broken = service.llm.fault is not None or not closed
    service.log.info("stopped", whole=whole and not broken)
    service.log_writer.close()
    status = EXIT_BROKEN if broken else 0 if whole else EXIT_CUT
    if not closed:
        # the interpreter would wait for the stuck thread
        os._exit(status)
    return status


def _shutdown_signals() -> list[signal.Signals]:
    # nohup ignores SIGHUP so that a server outlives its terminal
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_nohup else [signal.SIGHUP])]
