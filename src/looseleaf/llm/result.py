"""A future of an event loop that another thread completes."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Result(Generic[T]):
    """A future that another thread completes; ignored after the loop has closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[T] = loop.create_future()
        self._loop = loop

    def settle(self, value: T) -> None:
        self._call(lambda: self.future.set_result(value))

    def fail(self, error: Exception) -> None:
        self._call(lambda: self.future.set_exception(error))

    def _call(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: None if self.future.done() else action())
