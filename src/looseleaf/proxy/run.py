"""The proxy's process: its parts, its port, and its end by a signal."""

import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import uvicorn

from looseleaf.config import ServerConfig
from looseleaf.config.route import RouteConfig
from looseleaf.proxy.app import ProxyApp
from looseleaf.proxy.forwarder import Forwarder
from looseleaf.proxy.http_fleet import HttpFleet
from looseleaf.proxy.metrics import ProxyMetrics
from looseleaf.proxy.registered import RegisteredBodies
from looseleaf.server.limits import KeyLimits
from looseleaf.server.line_writer import LineWriter
from looseleaf.server.logs import forward_logging, make_log
from looseleaf.server.open_connections import (
    OpenConnections,
    connection_capacity,
    raise_descriptor_limit,
)
from looseleaf.server.ports import address_fields
from looseleaf.server.stalled import Connection


def make_proxy(
    urls: Sequence[str], config: RouteConfig, log: Any, operator_key: str = ""
) -> ProxyApp:
    """The proxy in front of the servers at ``urls``."""
    metrics = ProxyMetrics()
    fleet = HttpFleet(urls, config, metrics, log, operator_key)
    registered = RegisteredBodies(int(config.registered_mib * 2**20))
    return ProxyApp(
        Forwarder(fleet, registered, metrics),
        KeyLimits(config.requests_per_minute, config.concurrent_requests),
        int(config.max_body_mib * 2**20),
        log,
        opening=fleet.open,
        closing=fleet.close,
    )


class ProxyServer(uvicorn.Server):
    """Logs the address of the open port. A signal lets running requests end."""

    def __init__(self, app: ProxyApp, config: RouteConfig) -> None:
        # a request in flight has a second connection, to its replica
        pairs, backlog = connection_capacity(2 * config.max_connections)
        refused = app.forwarder.metrics.refused_connections
        self.connections = OpenConnections(max(1, pairs // 2), refused.inc)
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, connections=self.connections),  # type: ignore[arg-type]
                host=config.host,
                port=config.port,
                loop="asyncio",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=int(config.drain_seconds),
                timeout_keep_alive=30,
                backlog=backlog,
            )
        )
        self._app = app

    @property
    def bound_port(self) -> int:
        """The listening port, known after startup."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        # uvicorn's own handlers would end the process before the log's last line
        return nullcontext()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            fields = address_fields(str(self.config.host), self.bound_port, None)
            self._app.log.info("listening", **fields)


def route(urls: Sequence[str], config: RouteConfig, operator_key: str = "") -> int:
    """Serve until a signal; the exit status."""
    raise_descriptor_limit()
    writer = LineWriter()
    log = make_log(ServerConfig(log_level=config.log_level, log_format=config.log_format), writer)
    server = ProxyServer(make_proxy(urls, config, log, operator_key), config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    with forward_logging(log):
        server.run()
    log.info("stopped")
    writer.close()
    return 0
