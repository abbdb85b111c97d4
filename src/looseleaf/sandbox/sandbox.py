"""A pool of child processes for one kind of job, started on demand and reused.

A child serves one caller at a time. A child that exceeds a limit ends, and the next call starts a
new child."""

import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from looseleaf.errors import DeadlineExceeded, EngineClosed, InvalidRequest, LimitExceeded
from looseleaf.sandbox.process import Child, ChildEnded, Limits


class Sandbox:
    """Runs the job of the module ``looseleaf.sandbox.<job>`` in child processes. Thread-safe.

    ``setup`` returns the data that a child loads at its start. ``what`` labels errors;
    ``subject`` and ``advice`` begin and end their messages. `close` ends all children; a later
    call starts new children."""

    def __init__(
        self,
        job: str,
        setup: Callable[[], Any],
        *,
        what: str,
        subject: str,
        advice: str,
        nice: int = 0,
    ) -> None:
        self._job, self._setup, self._nice = f"looseleaf.sandbox.{job}", setup, nice
        self._what, self._subject, self._advice = what, subject, advice
        self._children = _Children()
        # runs at exit, and if the object is collected without `close`
        self._finalizer = weakref.finalize(self, self._children.end_all)

    def call(self, request: Any, limits: Limits | None = None, due: float = math.inf) -> Any:
        """The job's value; ``due`` is the caller's deadline, in monotonic seconds.

        Raises LimitExceeded, DeadlineExceeded, EngineClosed if `close` ends the job, and
        InvalidRequest with the job's message."""
        limits = Limits() if limits is None else limits
        generation = self._children.generation
        try:
            child = self._children.take(self._start, generation)
            try:
                answer = child.request(request, limits, due)
            except BaseException:
                self._children.drop(child)
                raise
        except ChildEnded as error:
            if self._children.generation != generation:
                raise EngineClosed(
                    f"{self._subject} was at work when the engine was closed: make a new engine"
                ) from error
            raise self._error(error.reason, limits) from error
        if "over" in answer:
            # a process may never return its memory to the system
            self._children.drop(child)
            raise self._error(answer["over"], limits)
        self._children.put_back(child)
        if "refused" in answer:
            raise InvalidRequest(answer["refused"])
        return answer["value"]

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return self._children.pids

    def close(self) -> None:
        """End all children, also during jobs."""
        self._children.end_all()

    def _start(self) -> Child:
        return Child(self._job, self._setup(), self._nice)

    def _error(self, reason: str, limits: Limits) -> Exception:
        if reason == "deadline":
            return DeadlineExceeded(
                f"{self._subject} was still at work at the request's deadline: {self._advice}"
            )
        if reason == "start":
            return LimitExceeded(
                self._what,
                f"no process could be started for {self._subject}: free some memory, or allow "
                "this user more processes",
            )
        used = {
            "time": f"{limits.seconds:g} s of computing",
            "memory": f"{limits.mib} MiB of memory",
            "output": f"{limits.output} bytes of output",
        }
        return LimitExceeded(
            self._what, f"{self._subject} took more than {used[reason]}: {self._advice}"
        )


class _Children:
    """The idle and busy children of a sandbox; ``generation`` counts calls of `end_all`."""

    def __init__(self) -> None:
        self.generation = 0
        self._lock, self._process = threading.Lock(), os.getpid()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [child.pid for child in (*self._idle, *self._busy)]

    def take(self, start: Callable[[], Child], generation: int) -> Child:
        """An idle child, or a new one. Raises `ChildEnded` after a concurrent `end_all`."""
        if self._process != os.getpid():
            self._leave_to_parent()
        while (child := self._take_idle()) is not None:
            if child.is_alive:
                return child
            # the system may end idle children if memory is short
            self.drop(child)
        child = start()
        with self._lock:
            if self.generation == generation:
                self._busy.add(child)
                return child
        child.end()
        raise ChildEnded("closed")

    def _take_idle(self) -> Child | None:
        with self._lock:
            child = self._idle.pop() if self._idle else None
            if child is not None:
                self._busy.add(child)
            return child

    def put_back(self, child: Child) -> None:
        with self._lock:
            if child in self._busy:
                self._busy.remove(child)
                self._idle.append(child)
                return
        # `end_all` ran during the job
        child.end()

    def drop(self, child: Child) -> None:
        with self._lock:
            self._busy.discard(child)
        child.end()

    def end_all(self) -> None:
        if self._process != os.getpid():
            return
        with self._lock:
            self.generation += 1
            idle, self._idle = self._idle, []
            busy, self._busy = self._busy, set()
        for child in idle:
            child.end()
        for child in busy:
            # the waiting caller collects the process
            child.kill()

    def _leave_to_parent(self) -> None:
        # a lock that another thread held at the fork is never released
        self._lock, self._process = threading.Lock(), os.getpid()
        for child in (*self._idle, *self._busy):
            child.abandon()
        self._idle, self._busy = [], set()
