"""Children for one kind of job, started when they are needed and kept warm.

A child serves one caller at a time, so there are as many as concurrent callers. One that exceeds a
limit is ended, and the next caller starts another."""

import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from looseleaf.errors import DeadlineExceeded, EngineClosed, InvalidRequest, LimitExceeded
from looseleaf.sandbox.process import Child, Ended, Limits


class Sandbox:
    """Runs the ``job`` of a module ``looseleaf.sandbox.<job>`` in processes of its own.

    ``setup`` is called once, for what a child loads before its first job. ``what`` labels errors,
    ``subject`` and ``advice`` are the beginning and the end of their sentences. Safe to share
    between threads. `close` ends all children; a later call starts new ones."""

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
        # at exit, and where the owner is collected without a close
        self._finalizer = weakref.finalize(self, self._children.end_all)

    def call(self, request: Any, limits: Limits | None = None, due: float = math.inf) -> Any:
        """The job's value. ``due`` is the caller's deadline, in monotonic seconds.

        Raises LimitExceeded, DeadlineExceeded, EngineClosed if `close` ends the job, and
        InvalidRequest with the job's own sentence."""
        limits = Limits() if limits is None else limits
        generation = self._children.generation
        try:
            child = self._children.take(self._start, generation)
            try:
                answer = child.ask(request, limits, due)
            except BaseException:
                self._children.drop(child)
                raise
        except Ended as ended:
            if self._children.generation != generation:
                raise EngineClosed(
                    f"{self._subject} was at work when the engine was closed: make a new engine"
                ) from ended
            raise self._error(ended.reason, limits) from ended
        if "over" in answer:
            # memory that was needed once may never be given back
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
        """End all children, those at work included."""
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
    """The idle and the busy children of a sandbox; ``generation`` counts how often all ended."""

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
        """An idle child, or one that ``start`` makes. Raises `Ended` if all ended meanwhile."""
        if self._process != os.getpid():
            self._leave_to_parent()
        while (child := self._take_idle()) is not None:
            if child.is_alive:
                return child
            # the system ended it, as where memory is short
            self.drop(child)
        child = start()
        with self._lock:
            if self.generation == generation:
                self._busy.add(child)
                return child
        child.end()
        raise Ended("closed")

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
        # all were ended meanwhile
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
            # its caller waits for the answer, and collects the process
            child.kill()

    def _leave_to_parent(self) -> None:
        # a lock that another thread held at the fork is held for ever
        self._lock, self._process = threading.Lock(), os.getpid()
        for child in (*self._idle, *self._busy):
            child.abandon()
        self._idle, self._busy = [], set()
