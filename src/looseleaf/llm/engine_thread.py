"""The thread that an engine steps in: commands between steps, outputs to whoever listens.

Everything that touches the engine goes through its queue. It knows no event loop: what it has to
say, it says by calling back."""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from looseleaf.engine.engine import Engine
from looseleaf.engine.fork_guard import Home
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.reports.stats import EngineSnapshot, StepStats
from looseleaf.errors import EngineClosed, EngineFault, LooseleafError
from looseleaf.prompt.request import Request

Outcome = RequestOutput | Exception
Deliver = Callable[[Outcome], None]
Fail = Callable[[Exception], None]
_log = logging.getLogger(__name__)


class Worker:
    """Steps an engine as long as it has work. Its public methods may be called from any thread.

    ``on_step`` hears of every step, in the thread of the worker. ``snapshot`` is the engine's,
    after the latest step or the latest of the commands that came together. ``fault`` is what broke
    the engine, if anything has."""

    def __init__(self, engine: Engine, on_step: Callable[[StepStats], None] | None = None) -> None:
        self.snapshot: EngineSnapshot = engine.snapshot()
        self.fault: EngineFault | None = None
        self._busy_since: float | None = None
        self._engine, self._home = engine, Home()
        self._on_step = on_step
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        engine.tiering.hurry = lambda: not self._commands.empty()
        self._streams: dict[str, Deliver] = {}
        self._watchers: list[tuple[Callable[[], bool], Fail]] = []
        # no command may follow the last one, or its caller would wait for ever
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._refusing = False
        self.thread = threading.Thread(target=self._work, name="looseleaf-engine", daemon=True)
        self.thread.start()
        # where nobody closes it: a thread in the middle of a step must not outlive the interpreter
        atexit.register(self.close)

    @property
    def is_open(self) -> bool:
        """Whether new work is taken."""
        return self._closed is None and not self._refusing and self._home.is_here

    @property
    def busy_seconds(self) -> float:
        """How long the step or command under way has taken; 0.0 while there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def is_idle(self) -> bool:
        """Whether no stream is open and nothing is left to compute; for the worker's thread."""
        return not self._streams and not self._engine.has_work

    def put(self, command: Callable[[], None], *, new: bool = False) -> None:
        """Have ``command`` called between two steps. Raises EngineClosed; for ``new`` work also
        once that is refused, and in a forked process, in which the thread does not run.
        """
        self._home.require()
        with self._lock:
            if self._closed is not None:
                raise EngineClosed(self._closed)
            if new and self._refusing:
                raise EngineClosed("the engine finishes what it has and closes: ask another one")
            self._commands.put(command)

    def wake(self) -> None:
        """Look at what is watched again, if the engine is not closed."""
        with contextlib.suppress(EngineClosed):
            self.put(lambda: None)

    def open(self, request: Request, since: float, deliver: Deliver) -> None:
        """Add a request that arrived at ``since``; ``deliver`` gets its growing output, or an
        error.
        """
        self.put(lambda: self._add(request, since, deliver), new=True)

    def leave(self, name: str, deliver: Deliver) -> None:
        """Abort the request of a listener who has left, if it has not ended."""
        with contextlib.suppress(EngineClosed):
            self.put(lambda: self._abort(name, deliver))

    def watch(self, done: Callable[[], bool], fail: Fail) -> None:
        """Call ``done`` now and after every step until it is true, but not between commands that
        came together: thousands may watch. ``fail`` hears what it raises, or that the engine was
        closed.
        """
        self.put(lambda: self._watchers.append((done, fail)))

    def refuse_new(self) -> None:
        """From now on take no new work."""
        with self._lock:
            self._refusing = True

    def close(self, timeout: float | None = None) -> bool:
        """Abort what runs and end the thread; whether it has ended within ``timeout`` seconds."""
        atexit.unregister(self.close)
        if not self._home.is_here:
            return True
        self._shut("this engine is closed: make a new one")
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def _shut(self, reason: str) -> None:
        with self._lock:
            if self._closed is None:
                self._closed = reason
                self._commands.put(None)

    # what follows runs in the worker's thread

    def _work(self) -> None:
        while True:
            stepped = False
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except Empty:
                command, stepped = self._step, True
            if command is None:
                with contextlib.suppress(Exception):
                    # what is done by now is so, though the end came along with it
                    self._tell()
                self._end(EngineClosed("the engine was closed: the answer is not complete"))
                return
            self._busy_since = time.monotonic()
            try:
                command()
                # whoever asks next is to see what the step has done
                if stepped or self._commands.empty():
                    self._tell()
            except BaseException as error:
                # whatever it is: a thread that ends without a word leaves its callers waiting
                self._break(error)
                with contextlib.suppress(Exception):
                    self._tell()
            self._busy_since = None

    def _add(self, request: Request, since: float, deliver: Deliver) -> None:
        try:
            self._engine.add(request, since)
        except Exception as error:
            deliver(error)
        else:
            self._streams[request.request_id] = deliver

    def _abort(self, name: str, deliver: Deliver) -> None:
        # only the stream that owns the id: a refused duplicate must not end the first
        if self._streams.get(name) is deliver:
            del self._streams[name]
            self._engine.abort(name)

    def _step(self) -> None:
        for progress in self._engine.step():
            self._publish(progress)
        stats = self._engine.last_step
        if self._on_step is not None and stats is not None:
            try:
                self._on_step(stats)
            except Exception:
                _log.exception("the function that hears of every step has failed")

    def _publish(self, progress: RequestProgress) -> None:
        name = progress.request.request_id
        deliver = self._streams.get(name)
        if deliver is None:
            return
        if progress.error is not None or progress.finished:
            del self._streams[name]
        deliver(progress.output() if progress.error is None else progress.error)

    def _tell(self) -> None:
        self.snapshot = self._engine.snapshot()
        waiting = []
        for done, fail in self._watchers:
            try:
                if not done():
                    waiting.append((done, fail))
            except Exception as error:
                fail(error)
        self._watchers = waiting

    def _break(self, error: BaseException) -> None:
        """The engine can't take back what it has booked: end everything rather than guess."""
        _log.error("the engine is broken and closes", exc_info=error)
        self._shut(f"the engine broke ({type(error).__name__}: {error}): start a new one")
        fault = EngineFault(f"the engine broke and was closed ({type(error).__name__}: {error})")
        fault.__cause__ = error
        self._end(fault)
        # last: who looks for it may take all callers to have been told
        self.fault = fault

    def _end(self, error: LooseleafError) -> None:
        # a request that a fault ends has failed; one whose engine is closed was given up
        why = error if isinstance(error, EngineFault) else None
        for name, deliver in list(self._streams.items()):
            del self._streams[name]
            with contextlib.suppress(Exception):
                self._engine.abort(name, why)
            deliver(error)
        for _, fail in self._watchers:
            fail(error)
        self._watchers = []
