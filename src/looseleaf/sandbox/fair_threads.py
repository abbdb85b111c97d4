"""A thread pool that schedules jobs fairly between tenants.

The tenant with the fewest running jobs is next. One thread always remains for other tenants.
Threads end without waiting jobs."""

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


class FairThreads:
    """At most ``size`` threads; a tenant uses at most ``size - 1``, but at least one."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Job]] = {}
        self._running: Counter[str] = Counter()
        self._closed = False

    def submit(
        self, tenant: str, function: Callable[P, T], *args: P.args, **named: P.kwargs
    ) -> "Future[T]":
        """The future of ``function``, which can be cancelled while it waits.

        Raises EngineClosed after `close`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise EngineClosed("this engine is closed: make a new one")
            jobs = self._waiting.setdefault(tenant, deque())
            jobs.append((future, lambda: function(*args, **named)))
            job = self._next()
        if job is not None:
            # daemon threads do not delay the interpreter's exit
            threading.Thread(target=self._work, args=job, name=self._name, daemon=True).start()
        return future

    async def run(
        self, tenant: str, function: Callable[P, T], *args: P.args, **named: P.kwargs
    ) -> T:
        """The result of ``function``; cancellation removes a waiting job."""
        return await asyncio.wrap_future(self.submit(tenant, function, *args, **named))

    def close(self) -> None:
        """Refuse waiting and later jobs; running jobs continue."""
        with self._lock:
            self._closed = True
            jobs = [job for waiting in self._waiting.values() for job in waiting]
            self._waiting.clear()
        for future, _ in jobs:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineClosed("the engine was closed before this job began"))

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
                    # to the end of the queue: other tenants have waited longer
                    self._waiting[tenant] = self._waiting.pop(tenant)
                next_job = self._next()
            if next_job is None:
                return
            tenant, job = next_job

    def _next(self) -> tuple[str, _Job] | None:
        """The next job and its tenant, counted as running; None if no job may run now."""
        if self._running.total() >= self._size:
            return None
        share = max(1, self._size - 1)
        ready = [tenant for tenant in self._waiting if self._running[tenant] < share]
        if not ready:
            return None
        tenant = min(ready, key=self._running.__getitem__)
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
        # a panic of a Rust library is not an Exception, and would end an event loop
        fault = EngineFault(f"a library failed on this request ({type(error).__name__}: {error})")
        fault.__cause__ = error
        future.set_exception(fault)
    else:
        future.set_result(value)
