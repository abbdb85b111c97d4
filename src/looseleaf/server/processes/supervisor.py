"""The parent: it starts the engine's process and the API processes, and replaces those that end.

It loads neither the model nor a web framework. Processes end when the parent ends, since each
watches the socket between them."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from looseleaf.config import ServerConfig
from looseleaf.errors import EngineLost, LooseleafError
from looseleaf.llm.remote.wire_error import error_from_wire
from looseleaf.server.counts import make_table
from looseleaf.server.line_writer import LineWriter
from looseleaf.server.logs import make_log
from looseleaf.server.ports import address_fields, reserve
from looseleaf.server.processes.control import (
    Close,
    Connect,
    Control,
    Drain,
    Ended,
    Failed,
    FromProcess,
    GiveUp,
    Listening,
    Lost,
    Progress,
    Ready,
    Restored,
    Samples,
    Scrape,
    Setup,
    Store,
    command,
)
from looseleaf.server.processes.responses import answer_store
from looseleaf.server.processes.samples import Family, counters_of, exposition, merged
from looseleaf.server.response_store import ResponseTable

EXIT_BROKEN, EXIT_CUT = 4, 5

_STEP_PATIENCE = 10.0
"""Seconds that the engine's process has for its last step."""

_KILL_SECONDS = 50.0
"""Time limit for the end of the engine's process: its last step, writes to tiers and threads."""

_SCRAPE_SECONDS = 2.0
_RECONNECT_SECONDS = 0.2
_REMEMBER_SECONDS = 10.0
# the number of metrics that the parent keeps for itself
_KEPT = -1
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0
_HEALTHY_SECONDS = 300.0
"""Seconds after which a process counts as healthy, and its next restart has no pause."""

OnProgress = Callable[[str, int, int], None]


@dataclass(eq=False)
class _Child:
    """One process and its control socket; ``slot`` is -1 for the engine's process."""

    slot: int
    process: "subprocess.Popen[bytes]"
    control: Control = field(init=False)
    started: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] | None = None
    listens: bool = False
    whole: bool | None = None
    families: list[Any] = field(default_factory=list)
    error: LooseleafError | None = None

    @property
    def is_engine(self) -> bool:
        return self.slot < 0


@dataclass(frozen=True)
class _ScrapeState:
    """A request ``number`` of an API process for the metrics of all processes."""

    child: _Child
    number: int
    pending: set[_Child]
    processes: list[Any] = field(default_factory=list)


class Supervisor:
    """The processes of one server. Raises the error of a process that can't start."""

    def __init__(
        self,
        model: str | None,
        config: ServerConfig,
        options: dict[str, Any],
        num_processes: int,
        startup_bar: Callable[[], AbstractContextManager[OnProgress]],
    ) -> None:
        """``startup_bar`` shows the progress of the first start, and ends with it."""
        self._model, self._config, self._options = model, config, options
        self._num, self._startup = num_processes, ExitStack()
        self._on_progress = self._startup.enter_context(startup_bar())
        self._responses = ResponseTable.of(config)
        self._writer = LineWriter()
        self._log = make_log(config, self._writer)
        self._engine: _Child | None = None
        self._apis: dict[int, _Child] = {}
        self._restarts, self._pauses = 0, dict[int, float]()
        self._scrapes: dict[int, _ScrapeState] = {}
        self._next_scrape = 0
        self._draining, self._forced, self._broken, self._cut = False, False, False, False
        self._announced = False
        self._restored = False
        self._past: list[Family] = []
        self._failure: LooseleafError | None = None
        self._ends: set[asyncio.Task[None]] = set()

    def run(self) -> int:
        """Serve until a signal or the end of the engine; the exit status."""
        with self._startup:
            try:
                return asyncio.run(self._run())
            finally:
                self._writer.close()

    async def _run(self) -> int:
        self._done = asyncio.Event()
        self._counts = make_table(self._num)
        with reserve(self._config.host, self._config.port) as reservation:
            self._port = int(reservation.getsockname()[1])
            self._engine = self._start("engine", -1)
            for slot in range(self._num):
                self._apis[slot] = self._start("api", slot)
            remembering = asyncio.create_task(self._remember_counters())
            try:
                await self._done.wait()
                await self._close_engine()
            finally:
                remembering.cancel()
                for child in self._children():
                    child.process.kill()
                    child.process.wait()
        if self._failure is not None:
            raise self._failure
        status = EXIT_BROKEN if self._broken else EXIT_CUT if self._cut or self._forced else 0
        self._log.info("stopped", whole=status == 0)
        return status

    def _children(self) -> list[_Child]:
        return [*([self._engine] if self._engine else []), *self._apis.values()]

    def _start(self, module: str, slot: int) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                command(module),
                stdin=theirs.fileno(),
                pass_fds=[self._counts],
                # a new session shields it from signals of the terminal
                start_new_session=True,
            )
        child = _Child(slot, process)
        child.control = Control(
            ours,
            FromProcess,
            lambda message: self._take(child, message),
            lambda: self._note_end(child),
        )
        child.control.send(
            Setup(
                self._model,
                asdict(self._config),
                self._options,
                slot,
                self._port,
                self._num,
                self._counts,
            )
        )
        return child

    def _take(self, child: _Child, message: Any) -> None:
        if isinstance(message, Progress):
            if not self._announced:
                self._on_progress(message.stage, message.completed, message.total)
        elif isinstance(message, Ready):
            self._take_engine(child, message.facts)
        elif isinstance(message, Listening):
            child.listens = True
            self._announce()
        elif isinstance(message, Failed):
            child.error = error_from_wire(message.error)
        elif isinstance(message, Ended):
            child.whole = message.whole
        elif isinstance(message, Lost):
            asyncio.get_running_loop().call_later(_RECONNECT_SECONDS, self._connect, child)
        elif isinstance(message, Restored):
            self._restored = True
            for other in self._apis.values():
                other.control.send(message)
        elif isinstance(message, Scrape):
            self._scrape(child, message.number)
        elif isinstance(message, Samples):
            self._take_samples(child, message)
        elif isinstance(message, Store):
            child.control.send(answer_store(self._responses, message))

    def _take_engine(self, child: _Child, facts: dict[str, Any]) -> None:
        child.facts, self._restored = facts, False
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, True)
        # nohup ignores SIGHUP so that a server outlives its terminal
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_signal, False)
        for api in self._apis.values():
            self._connect(api)

    def _connect(self, api: _Child) -> None:
        """Connect an API process with the engine, if it is loaded."""
        engine = self._engine
        if engine is None or engine.facts is None or api not in self._apis.values():
            return
        front, back = socket.socketpair()
        engine.control.send_socket(Connect(), back)
        api.control.send_socket(Connect(engine.facts), front)
        if self._restored:
            api.control.send(Restored())

    def _announce(self) -> None:
        if self._announced or not all(api.listens for api in self._apis.values()):
            return
        self._announced = True
        self._startup.close()
        assert self._engine is not None and self._engine.facts is not None
        threads = self._engine.facts["threads"]
        fields = address_fields(
            self._config.host, self._port, threads, encrypted=self._config.tls_cert is not None
        )
        self._log.info("listening", **fields, api_processes=self._num)

    def _on_signal(self, may_force: bool) -> None:
        """Begin shutdown. A second SIGTERM or SIGINT skips the drain; SIGHUP never does."""
        self._forced = self._forced or (self._draining and may_force)
        self._drain()

    def _drain(self) -> None:
        self._draining = True
        for api in self._apis.values():
            api.control.send(Drain(self._forced))
        if not self._apis:
            self._done.set()

    def _note_end(self, child: _Child) -> None:
        task = asyncio.create_task(self._end(child))
        # the loop keeps weak references only
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _end(self, child: _Child) -> None:
        """Collect a process that has ended, and replace it unless the server ends."""
        status = await asyncio.to_thread(child.process.wait)
        self._drop_scrapes(child)
        # counters never fall, so that rates over them stay right
        self._past = merged([self._past, counters_of(child.families)])
        if self._done.is_set():
            return
        if child.error is not None and not self._announced:
            self._fail(child.error)
            return
        if child.is_engine:
            self._engine = None
            if time.monotonic() - child.started > _HEALTHY_SECONDS:
                self._restarts = 0
            await self._replace_engine(status)
            return
        del self._apis[child.slot]
        if self._draining:
            self._cut = self._cut or (child.listens and not child.whole)
            if not self._apis:
                self._done.set()
            return
        if not self._announced:
            self._fail(EngineLost(f"an API process ended with status {status}"))
            return
        if not child.whole:
            self._log.error("api_process_lost", slot=child.slot, status=status)
        await self._pause(child)
        if not self._draining and not self._done.is_set():
            self._apis[child.slot] = child = self._start("api", child.slot)
            self._connect(child)

    def _fail(self, error: LooseleafError) -> None:
        """End a server that could not start."""
        self._failure = self._failure or error
        self._done.set()

    async def _replace_engine(self, status: int) -> None:
        self._restarts += 1
        gives_up = self._draining or not self._announced
        gives_up = gives_up or self._restarts > self._config.engine_restarts
        self._log.error(
            "engine_lost", status=status, restarts=self._restarts - 1, starts_again=not gives_up
        )
        if gives_up:
            self._broken = True
            for api in self._apis.values():
                api.control.send(GiveUp("the engine's process has ended"))
            self._drain()
            if not self._announced:
                self._fail(EngineLost(f"the engine's process ended with status {status}"))
            return
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (self._restarts - 1))
        await asyncio.sleep(pause)
        if not self._done.is_set():
            self._engine = self._start("engine", -1)

    async def _pause(self, child: _Child) -> None:
        """Wait before the restart of a process, longer each time it ends early."""
        pause = self._pauses.get(child.slot, 0.0)
        if time.monotonic() - child.started > _HEALTHY_SECONDS:
            pause = 0.0
        self._pauses[child.slot] = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * pause))
        await asyncio.sleep(pause)

    async def _close_engine(self) -> None:
        engine = self._engine
        if engine is None or engine.facts is None or engine.process.poll() is not None:
            # one that still loads has no requests
            return
        engine.control.send(Close(_STEP_PATIENCE))
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                while engine.process.poll() is None:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self._broken = True
            return
        self._broken = self._broken or engine.process.returncode != 0

    async def _remember_counters(self) -> None:
        """Keep the counters of every process, for the time after its end."""
        while True:
            await asyncio.sleep(_REMEMBER_SECONDS)
            for child in self._children():
                if child.listens or child.facts is not None:
                    child.control.send(Scrape(_KEPT))

    def _scrape(self, child: _Child, number: int) -> None:
        """Request the metrics of all processes, and answer with those that arrive in time."""
        key, self._next_scrape = self._next_scrape, self._next_scrape + 1
        pending = {c for c in self._children() if c.listens or c.facts is not None}
        self._scrapes[key] = _ScrapeState(child, number, pending)
        for process in list(pending):
            process.control.send(Scrape(key))
        asyncio.get_running_loop().call_later(_SCRAPE_SECONDS, self._answer_scrape, key)

    def _take_samples(self, child: _Child, message: Samples) -> None:
        child.families = message.families
        scrape = self._scrapes.get(message.number)
        if scrape is not None:
            scrape.processes.append(message.families)
            self._expect_no_samples(message.number, child)

    def _drop_scrapes(self, child: _Child) -> None:
        for key in list(self._scrapes):
            self._expect_no_samples(key, child)

    def _expect_no_samples(self, key: int, child: _Child) -> None:
        pending = self._scrapes[key].pending
        pending.discard(child)
        if not pending:
            self._answer_scrape(key)

    def _answer_scrape(self, key: int) -> None:
        scrape = self._scrapes.pop(key, None)
        if scrape is not None:
            text = exposition([self._past, *scrape.processes])
            scrape.child.control.send(Samples(scrape.number, text=text))


def default_processes(device: str, cores: int | None) -> int:
    """The number of API processes by default, for the option ``device`` of the engine."""
    cores = cores or 1
    on_gpu = device != "cpu" and os.path.exists("/dev/nvidiactl")
    if on_gpu:
        return max(1, min(4, cores // 4))
    return 1 if cores > 2 else 0
