"""Calls from coroutines into the engine's thread, between two steps."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from looseleaf.engine.engine import Engine
from looseleaf.llm.engine_thread import Fail, Worker
from looseleaf.llm.result import Result

T = TypeVar("T")


class EngineCalls:
    """The pending calls of one engine's thread; `abandon` fails them if it does not respond."""

    def __init__(self, engine: Engine, worker: Worker) -> None:
        self._engine, self._worker = engine, worker
        self._pending: set[Fail] = set()

    async def call(self, function: Callable[[Engine], T], *, new: bool = False) -> T:
        """The result of ``function``, as by `AsyncLLM.call`."""
        result: Result[T] = Result(asyncio.get_running_loop())

        def command() -> None:
            try:
                result.settle(function(self._engine))
            except Exception as error:
                result.fail(error)

        with self.pending(result.fail):
            self._worker.put(command, new=new)
            return await result.future

    async def watch(self, look: Callable[[], T | None]) -> T:
        """The first result of ``look`` that is not None.

        The engine's thread calls ``look`` now and after every step."""
        result: Result[T] = Result(asyncio.get_running_loop())

        def is_done() -> bool:
            value = look()
            if value is not None:
                result.settle(value)
            return value is not None or result.future.cancelled()

        with self.pending(result.fail):
            self._worker.watch(is_done, result.fail)
            return await result.future

    @contextmanager
    def pending(self, fail: Fail) -> Iterator[None]:
        """Have `abandon` call ``fail`` during the context."""
        self._pending.add(fail)
        try:
            yield
        finally:
            self._pending.discard(fail)

    def abandon(self, error: Exception) -> None:
        """Fail all pending calls with ``error``."""
        for fail in list(self._pending):
            fail(error)
