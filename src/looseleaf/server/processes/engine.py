"""The engine's process: it loads the model, and serves the API processes."""

import asyncio
import gc
import os
import signal
import socket
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector

from looseleaf.config import ServerConfig
from looseleaf.errors import LooseleafError
from looseleaf.llm.async_llm import AsyncLLM
from looseleaf.llm.load import find_model
from looseleaf.llm.remote.host import EngineHost
from looseleaf.llm.remote.link import frame_of
from looseleaf.llm.remote.wire_error import error_to_wire
from looseleaf.server.engine_metrics import EngineMetrics
from looseleaf.server.line_writer import LineWriter
from looseleaf.server.logs import forward_logging, make_log
from looseleaf.server.names import base_name
from looseleaf.server.processes.control import (
    Close,
    Connect,
    Control,
    Failed,
    Progress,
    Ready,
    Samples,
    Scrape,
    ToProcess,
    begin,
)
from looseleaf.server.processes.samples import families_of

EXIT_BROKEN = 4
_POLL_SECONDS = 0.1


def main() -> None:
    """Run an engine for the parent on the standard input."""
    # the parent ends the engine after the last request, and a supervisor signals all processes
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link, setup = begin()
    config = ServerConfig(**setup.server)
    writer = LineWriter()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = EngineMetrics(registry)

    def on_progress(stage: str, completed: int, total: int) -> None:
        link.sendall(frame_of(Progress(stage, completed, total)))

    with forward_logging(make_log(config, writer)):
        try:
            llm = AsyncLLM(
                find_model(setup.model),
                warm_up=config.warm_up,
                on_step=metrics.on_step,
                on_progress=on_progress,
                **setup.engine,
            )
        except LooseleafError as error:
            link.sendall(frame_of(Failed(error_to_wire(error))))
            writer.close()
            raise SystemExit(2) from None
        metrics.watch(llm, base_name(setup.model, config))
        gc.collect()
        # weights, graphs and modules are permanent; collecting them would pause all answers
        gc.freeze()
        status = asyncio.run(_Process(link, llm, registry).run())
    writer.close()
    raise SystemExit(status)


class _Process:
    """The engine, its links and the control socket, in an event loop."""

    def __init__(self, link: socket.socket, llm: AsyncLLM, registry: CollectorRegistry) -> None:
        self._link, self._llm, self._registry = link, llm, registry

    async def run(self) -> int:
        """Serve until the parent says so, or the engine breaks; the exit status."""
        self._closing: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._host = EngineHost(self._llm)
        self._control = Control(self._link, ToProcess, self._take, lambda: None)
        self._control.send(Ready(asdict(self._llm.facts)))
        while not self._closing.done() and self._llm.fault is None:
            await asyncio.wait({self._closing}, timeout=_POLL_SECONDS)
        patience = self._closing.result() if self._closing.done() else 0.0
        closed = await asyncio.to_thread(self._llm.close, patience)
        self._host.close()
        if not closed:
            # the interpreter would wait for the stuck thread
            os._exit(EXIT_BROKEN)
        return EXIT_BROKEN if self._llm.fault is not None else 0

    def _take(self, message: Any) -> None:
        if isinstance(message, Connect):
            self._host.connect(self._control.sockets.popleft())
        elif isinstance(message, Scrape):
            self._control.send(Samples(message.number, families_of(self._registry)))
        elif isinstance(message, Close) and not self._closing.done():
            self._closing.set_result(message.patience)
