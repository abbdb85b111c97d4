"""The log: one line an event, with the request's id, on standard error."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from looseleaf.config import ServerConfig
from looseleaf.server.line_writer import LineWriter

_REPEAT_SECONDS = 5.0
_MOST_REMEMBERED = 100

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def make_log(config: ServerConfig, stream: Any) -> Any:
    """A structured logger of this server's own, for a text stream; nothing is set globally. Over a
    `LineWriter` an event says how many ``lines_dropped`` were to stand before it, if any."""
    pretty = config.log_format == "console"
    last: Any = (
        structlog.dev.ConsoleRenderer(colors=False)
        if pretty
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    processors: list[Any] = [
        *([_Admission(stream)] if isinstance(stream, LineWriter) else []),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *([] if pretty else [structlog.processors.format_exc_info]),
        last,
    ]
    return structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.log_level]),
        cache_logger_on_first_use=True,
    )


class _Admission:
    """Makes no line of an event that would be dropped, and adds those that were to the next."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def __call__(self, log: Any, method: str, event: Any) -> Any:
        if self._writer.is_full:
            self._writer.drop()
            raise structlog.DropEvent
        if dropped := self._writer.take_dropped():
            event["lines_dropped"] = dropped
        return event


@contextmanager
def taking_over(log: Any, quiet: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """What the engine and the web server say by Python's own loggers is an event of ``log``: by
    itself it would be lines of another form between those of the log. While ``quiet`` says so it is
    nothing."""
    handler, root = _Forwarder(log, quiet), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


class _Forwarder(logging.Handler):
    """What is said again within ``_REPEAT_SECONDS`` is only counted: the next time has the sum as
    its ``repeats``. A loop that fails at every turn would else be all that the log holds."""

    def __init__(self, log: Any, quiet: Callable[[], bool]) -> None:
        super().__init__()
        self._log, self._quiet = log, quiet
        # when each was said, and how often it has been since; the oldest first
        self._said: OrderedDict[tuple[str, ...], list[float]] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        if self._quiet():
            return
        fault = record.exc_info[1] if record.exc_info else None
        text = record.getMessage()
        repeats = self._count((record.name, text, repr(fault)), record.created)
        if repeats is None:
            return
        level = min(50, max(10, record.levelno // 10 * 10))
        more: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
        if repeats:
            more["repeats"] = repeats
        self._log.log(level, "message", logger=record.name, text=text, **more)

    def _count(self, message: tuple[str, ...], now: float) -> int | None:
        """How often it was not said since it last was; None if it is not to be said now."""
        # handlers are called with their own lock held, one thread at a time
        said = self._said.get(message)
        if said is not None and 0 <= now - said[0] < _REPEAT_SECONDS:
            said[1] += 1
            return None
        self._said.pop(message, None)
        self._said[message] = [now, 0]
        if len(self._said) > _MOST_REMEMBERED:
            self._said.popitem(last=False)
        return int(said[1]) if said else 0
