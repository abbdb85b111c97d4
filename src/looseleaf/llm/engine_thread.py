"""The engine's thread: it steps the engine, runs commands between steps and delivers outputs.

All access to the engine goes through the thread's queue. Results go to callbacks, so this file
depends on no event loop."""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from looseleaf.engine.engine import Engine
from looseleaf.engine.lifetime import ForkGuard
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.reports.stats import EngineSnapshot, StepStats
from looseleaf.errors import EngineClosed, EngineFault, LooseleafError
from looseleaf.prompt.request import Request

Change = RequestProgress | Exception
"""A request that has new tokens or has ended, or the error that ended it."""

Deliver = Callable[[Change], None]
Fail = Callable[[Exception], None]
_log = logging.getLogger(__name__)


class Worker:
    """Steps an engine while it has work. Public methods are thread-safe.

    ``on_step`` gets the statistics of every step, in the worker's thread. ``snapshot`` is the
    engine's state after the latest step or batch of commands. ``fault`` is the error that broke the
    engine, else None. ``delivered`` is called in the worker's thread after the deliveries of a step
    or a command."""

    def __init__(self, engine: Engine, on_step: Callable[[StepStats], None] | None = None) -> None:
        self.snapshot: EngineSnapshot = engine.snapshot()
        self.fault: EngineFault | None = None
        self._busy_since: float | None = None
        self._engine, self._fork_guard = engine, ForkGuard()
        self._on_step = on_step
        self.delivered: Callable[[], None] = lambda: None
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        engine.tiering.hurry = lambda: not self._commands.empty()
        self._streams: dict[str, Deliver] = {}
        self._watchers: list[tuple[Callable[[], bool], Fail]] = []
        # a command after the end of the queue would never run
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._refusing = False
        self.thread = threading.Thread(target=self._work, name="looseleaf-engine", daemon=True)
        self.thread.start()
        # the thread must end before the interpreter, also without a call of close
        atexit.register(self.close)

    @property
    def is_open(self) -> bool:
        """Whether new work is accepted."""
        return self._closed is None and not self._refusing and self._fork_guard.is_owner

    @property
    def busy_seconds(self) -> float:
        """Seconds since the current step or command began; 0.0 while idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def is_idle(self) -> bool:
        """Whether no stream is open and the engine has no work; for the worker's thread."""
        return not self._streams and not self._engine.has_work

    def put(self, command: Callable[[], None], *, new: bool = False) -> None:
        """Queue ``command`` for a call between two steps.

        Raises EngineClosed; for ``new`` work also after `refuse_new`, and in a forked process."""
        self._fork_guard.require()
        with self._lock:
            if self._closed is not None:
                raise EngineClosed(self._closed)
            if new and self._refusing:
                raise EngineClosed("the engine finishes its requests and closes: use another one")
            self._commands.put(command)

    def wake(self) -> None:
        """Check the watchers soon; ignored by a closed engine."""
        with contextlib.suppress(EngineClosed):
            self.put(lambda: None)

    def open(self, request: Request, since: float, deliver: Deliver) -> None:
        """Add a request that arrived at ``since``; ``deliver`` gets its changes or an error.

        It is called in the worker's thread, between two steps."""
        self.put(lambda: self._add(request, since, deliver), new=True)

    def leave(self, name: str, deliver: Deliver) -> None:
        """Abort the request of a stream that its reader has left."""
        with contextlib.suppress(EngineClosed):
            self.put(lambda: self._abort(name, deliver))

    def end_output(self, name: str, index: int) -> None:
        """End one output of a stream, whose reader has found a stop string in its text."""
        with contextlib.suppress(EngineClosed):
            self.put(lambda: self._end_output(name, index))

    def watch(self, is_done: Callable[[], bool], fail: Fail) -> None:
        """Call ``is_done`` now and after every step until it returns True.

        A batch of commands counts as a step, since thousands may watch. ``fail`` gets its error, or
        EngineClosed."""
        self.put(lambda: self._watchers.append((is_done, fail)))

    def refuse_new(self) -> None:
        """Reject new work from now on."""
        with self._lock:
            self._refusing = True

    def close(self, timeout: float | None = None) -> bool:
        """Abort all requests and end the thread; returns whether it ends in ``timeout`` seconds."""
        atexit.unregister(self.close)
        if not self._fork_guard.is_owner:
            return True
        self._shut("this engine is closed: make a new one")
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def _shut(self, reason: str) -> None:
        with self._lock:
            if self._closed is None:
                self._closed = reason
                self._commands.put(None)

    # the methods below run in the worker's thread

    def _work(self) -> None:
        while True:
            stepped = False
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except Empty:
                command, stepped = self._step, True
            if command is None:
                with contextlib.suppress(Exception):
                    # report completed work before the end
                    self._publish_state()
                self._end(EngineClosed("the engine was closed: the answer is not complete"))
                self.delivered()
                return
            self._busy_since = time.monotonic()
            try:
                command()
                self.delivered()
                # the next reader must see the result of the step
                if stepped or self._commands.empty():
                    self._publish_state()
            except BaseException as error:
                # any error: callers would wait for ever for a thread that ends silently
                self._break(error)
                with contextlib.suppress(Exception):
                    self._publish_state()
            self._busy_since = None

    def _add(self, request: Request, since: float, deliver: Deliver) -> None:
        try:
            self._engine.add(request, since)
        except Exception as error:
            deliver(error)
        else:
            self._streams[request.request_id] = deliver

    def _abort(self, name: str, deliver: Deliver) -> None:
        # a rejected duplicate must not abort the request that owns the id
        if self._streams.get(name) is deliver:
            del self._streams[name]
            self._engine.abort(name)

    def _end_output(self, name: str, index: int) -> None:
        progress = self._engine.end_output(name, index)
        if progress is not None:
            self._publish(progress)

    def _step(self) -> None:
        for progress in self._engine.step():
            self._publish(progress)
        stats = self._engine.last_step
        if self._on_step is not None and stats is not None:
            try:
                self._on_step(stats)
            except Exception:
                _log.exception("the on_step callback has failed")

    def _publish(self, progress: RequestProgress) -> None:
        name = progress.request.request_id
        deliver = self._streams.get(name)
        if deliver is None:
            return
        if progress.error is not None or progress.finished:
            del self._streams[name]
        deliver(progress if progress.error is None else progress.error)

    def _publish_state(self) -> None:
        self.snapshot = self._engine.snapshot()
        pending = []
        for is_done, fail in self._watchers:
            try:
                if not is_done():
                    pending.append((is_done, fail))
            except Exception as error:
                fail(error)
        self._watchers = pending

    def _break(self, error: BaseException) -> None:
        """End everything, since the engine can't roll back a failed step."""
        _log.error("the engine is broken and closes", exc_info=error)
        self._shut(f"the engine broke ({type(error).__name__}: {error}): start a new one")
        fault = EngineFault(f"the engine broke and was closed ({type(error).__name__}: {error})")
        fault.__cause__ = error
        self._end(fault)
        self.delivered()
        # last, so readers of `fault` know that all callers have the error
        self.fault = fault

    def _end(self, error: LooseleafError) -> None:
        # a fault fails requests, closing the engine aborts them
        cause = error if isinstance(error, EngineFault) else None
        for name, deliver in list(self._streams.items()):
            del self._streams[name]
            with contextlib.suppress(Exception):
                self._engine.abort(name, cause)
            deliver(error)
        for _, fail in self._watchers:
            fail(error)
        self._watchers = []
