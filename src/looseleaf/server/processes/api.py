"""An API process: HTTP, templates, tokenizer, text and streams, without the model."""

import asyncio
import gc
import signal
import socket
from itertools import count
from typing import Any

from looseleaf.config import ServerConfig
from looseleaf.errors import EngineLost, LooseleafError
from looseleaf.llm.client import EngineFacts
from looseleaf.llm.remote.client import RemoteEngine
from looseleaf.llm.remote.link import frame_of
from looseleaf.llm.remote.wire_error import error_to_wire
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.server.counts import SharedCounts
from looseleaf.server.errors import unavailable
from looseleaf.server.logs import forward_logging
from looseleaf.server.metrics import ServerMetrics
from looseleaf.server.open_connections import raise_descriptor_limit
from looseleaf.server.ports import shared_socket
from looseleaf.server.processes.control import (
    Connect,
    Control,
    Drain,
    Ended,
    Failed,
    GiveUp,
    Listening,
    Lost,
    Restored,
    Samples,
    Scrape,
    Setup,
    Stored,
    ToProcess,
    begin,
)
from looseleaf.server.processes.responses import RemoteStore
from looseleaf.server.processes.samples import families_of
from looseleaf.server.processes.starting import StartingServer
from looseleaf.server.registering import register_again
from looseleaf.server.run import Server, log_loaded
from looseleaf.server.service import Frontend, Service

_SCRAPE_SECONDS = 10.0


def main() -> None:
    """Run an API process for the parent on the standard input."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link, setup = begin()
    config = ServerConfig(**setup.server)
    raise_descriptor_limit()
    try:
        frontend = Frontend.create(setup.model, config, announces=setup.slot == 0)
        tokenizer = Tokenizer(frontend.folder)
    except LooseleafError as error:
        link.sendall(frame_of(Failed(error_to_wire(error))))
        raise SystemExit(2) from None
    process = _Process(link, setup, frontend, tokenizer)
    # a forced exit would log a traceback for every request
    with forward_logging(frontend.log, lambda: process.is_forced):
        asyncio.run(process.run())
    frontend.log_writer.close()


class _ApiServer(Server):
    """A `Server` that reports to the parent."""

    def __init__(self, service: Service, num_processes: int, control: Control) -> None:
        super().__init__(service, num_processes)
        self._control = control

    def announce(self) -> None:
        self._control.send(Listening())


class _Process:
    """The service of one API process, and the control socket, in an event loop."""

    def __init__(
        self, link: socket.socket, setup: Setup, frontend: Frontend, tokenizer: Tokenizer
    ) -> None:
        self._socket, self._setup = link, setup
        self._frontend, self._tokenizer = frontend, tokenizer
        self._numbers = count()
        self._scrapes: dict[int, asyncio.Future[bytes]] = {}
        self._restoring: asyncio.Task[None] | None = None
        self._llm: RemoteEngine | None = None
        self._server: Server | None = None
        self._metrics = ServerMetrics()
        self._is_restored = False

    @property
    def is_forced(self) -> bool:
        """Whether the server ends without waiting for its requests."""
        return self._server is not None and self._server.force_exit

    async def run(self) -> None:
        """Serve until the parent or a signal says so."""
        setup = self._setup
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._control = Control(self._socket, ToProcess, self._take, lambda: None)
        self._responses = RemoteStore(self._control)
        with shared_socket(self._frontend.config.host, setup.port) as listener:
            starting = StartingServer()
            await starting.open(listener)
            await self._connected
            await starting.close()
            await self._serve(listener)

    async def _serve(self, listener: socket.socket) -> None:
        """Serve the API at a socket, over a loaded engine."""
        setup = self._setup
        assert self._llm is not None
        counts = SharedCounts(setup.counts, setup.slot, setup.num_processes)
        service = self._frontend.service(self._llm, self._metrics, counts)
        service.scrape, service.restores = self._scrape, False
        service.responses = self._responses
        if self._is_restored:
            service.records.coming.clear()
        self._server = server = _ApiServer(service, setup.num_processes, self._control)
        gc.collect()
        gc.freeze()
        if setup.slot == 0:
            log_loaded(server)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._retire)
        self._begin_restoring(service, is_first=True)
        try:
            await server.serve([listener])
        finally:
            self._llm.close()
            whole = service.whole is not False and not server.force_exit
            self._control.send(Ended(whole))

    def _take(self, message: Any) -> None:
        if isinstance(message, Connect):
            self._connect(message, self._control.sockets.popleft())
        elif isinstance(message, Scrape):
            self._control.send(Samples(message.number, families_of(self._metrics.registry)))
        elif isinstance(message, Samples):
            if (scrape := self._scrapes.pop(message.number, None)) and not scrape.done():
                scrape.set_result(message.text)
        elif isinstance(message, Stored):
            self._responses.take(message)
        elif isinstance(message, Drain):
            self._drain(message.force)
        elif isinstance(message, GiveUp) and self._llm is not None:
            self._llm.fault = EngineLost(message.reason)
        elif isinstance(message, Restored):
            self._is_restored = True
            if self._server is not None:
                self._server.service.records.coming.clear()

    def _connect(self, message: Connect, link: socket.socket) -> None:
        assert message.facts is not None, "an API process gets the facts of the engine"
        facts = EngineFacts(**message.facts)
        if self._llm is None:
            self._llm = RemoteEngine(
                self._tokenizer, facts, on_lost=lambda: self._control.send(Lost())
            )
        self._llm.attach(link)
        if not self._connected.done():
            self._connected.set_result(None)
        elif self._server is not None:
            self._is_restored = False
            self._server.service.records.expect_all()
            self._begin_restoring(self._server.service, is_first=False)

    def _begin_restoring(self, service: Service, *, is_first: bool) -> None:
        """Give an engine the documents of the server, and system prompts unless it is the first
        engine, whose prompts are computed before the port opens."""
        if self._restoring is not None:
            self._restoring.cancel()
        self._restoring = asyncio.create_task(self._restore(service, is_first))

    async def _restore(self, service: Service, is_first: bool) -> None:
        try:
            if not is_first:
                await service.start()
            if self._setup.slot == 0:
                await register_again(service)
                self._control.send(Restored())
        except EngineLost:
            # the next engine gets them
            pass

    def _retire(self) -> None:
        """End alone: new connections go to the other processes."""
        self._drain(False)
        if self._server is not None and self._setup.num_processes > 1:
            for listener in self._server.servers:
                listener.close()

    def _drain(self, force: bool) -> None:
        if self._server is None:
            raise SystemExit(0)
        self._server.service.begin_shutdown()
        self._server.should_exit = True
        self._server.force_exit = self._server.force_exit or force

    async def _scrape(self) -> bytes:
        """The metrics of all processes, from the parent. Raises ApiError (503)."""
        number = next(self._numbers)
        scrape = self._scrapes[number] = asyncio.get_running_loop().create_future()
        self._control.send(Scrape(number))
        try:
            async with asyncio.timeout(_SCRAPE_SECONDS):
                content: bytes = await scrape
                return content
        except TimeoutError as error:
            raise unavailable("the metrics did not arrive: ask again", "no_metrics") from error
        finally:
            self._scrapes.pop(number, None)
