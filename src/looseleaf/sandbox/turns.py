"""Threads that tenants take in fair turns.

The tenant with the fewest jobs at work is next, and no tenant gets the last thread: another one
always finds it free. A thread ends when nothing waits, so an idle object holds none."""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from looseleaf.errors import EngineClosed, EngineFault

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple["Future[Any]", Callable[[], Any]]


class Turns:
    """At most ``size`` threads, of which one tenant takes ``size - 1``, but at least one."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Job]] = {}
        self._running: Counter[str] = Counter()
        self._closed = False

    def submit(
        self, tenant: str, function: Callable[P, T], *args: P.args, **named: P.kwargs
    ) -> "Future[T]":
        """The future of ``function``; cancelled before its turn, it never runs. Raises
        EngineClosed after `close`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise EngineClosed("this engine is closed: make a new one")
            jobs = self._waiting.setdefault(tenant, deque())
            jobs.append((future, lambda: function(*args, **named)))
            job = self._next()
        if job is not None:
            # a daemon: the interpreter's end waits for no job
            threading.Thread(target=self._work, args=job, name=self._name, daemon=True).start()
        return future

    async def run(
        self, tenant: str, function: Callable[P, T], *args: P.args, **named: P.kwargs
    ) -> T:
        """What ``function`` returns, in its tenant's turn; cancelling gives the turn up."""
        return await asyncio.wrap_future(self.submit(tenant, function, *args, **named))

    def close(self) -> None:
        """Refuse what waits and what comes later; what runs goes on."""
        with self._lock:
            self._closed = True
            jobs = [job for waiting in self._waiting.values() for job in waiting]
            self._waiting.clear()
        for future, _ in jobs:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineClosed("the engine was closed before this began"))

    def _work(self, tenant: str, job: _Job) -> None:
        while True:
            future, function = job
            if future.set_running_or_notify_cancel():
                _settle(future, function)
            with self._lock:
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                if tenant in self._waiting:
                    # the end of the order: others have waited longer
                    self._waiting[tenant] = self._waiting.pop(tenant)
                following = self._next()
            if following is None:
                return
            tenant, job = following

    def _next(self) -> tuple[str, _Job] | None:
        """The next job and its tenant, counted as running; None if none may run now."""
        if self._running.total() >= self._size:
            return None
        share = max(1, self._size - 1)
        ready = [tenant for tenant in self._waiting if self._running[tenant] < share]
        if not ready:
            return None
        tenant = min(ready, key=lambda one: self._running[one])
        jobs = self._waiting.pop(tenant)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs
        self._running[tenant] += 1
        return tenant, job


def _settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    try:
        value = function()
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:
        # a panic of a Rust library is no Exception, and would end an event loop
        fault = EngineFault(f"a library failed on this request ({type(error).__name__}: {error})")
        fault.__cause__ = error
        future.set_exception(fault)
    else:
        future.set_result(value)
