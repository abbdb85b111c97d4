"""The log: one line per event on standard error."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from looseleaf.config import ServerConfig
from looseleaf.server.line_writer import LineWriter

_REPEAT_SECONDS = 5.0
_MAX_MESSAGES = 100

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def make_log(config: ServerConfig, stream: Any) -> Any:
    """A structured logger on a text stream, without global configuration.

    On a `LineWriter` an event has ``lines_dropped``, the number of dropped lines before it."""
    pretty = config.log_format == "console"
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=False)
        if pretty
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    processors: list[Any] = [
        *([_DropCounter(stream)] if isinstance(stream, LineWriter) else []),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *([] if pretty else [structlog.processors.format_exc_info]),
        renderer,
    ]
    return structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.log_level]),
        cache_logger_on_first_use=True,
    )


class _DropCounter:
    """Drops events before formatting while the writer is full, and reports the number later."""

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
def forward_logging(log: Any, quiet: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Forward records of Python's loggers to ``log``, and drop them while ``quiet()`` is true."""
    handler, root = _Forwarder(log, quiet), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


class _Forwarder(logging.Handler):
    """Counts repeated messages within ``_REPEAT_SECONDS`` instead of logging them.

    The next logged message has the count as ``repeats``. A failing loop can't flood the log."""

    def __init__(self, log: Any, quiet: Callable[[], bool]) -> None:
        super().__init__()
        self._log, self._quiet = log, quiet
        # message: [time of its last event, repeats since]; oldest first
        self._recent: OrderedDict[tuple[str, ...], list[float]] = OrderedDict()

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
        """Repeats since the message's last event; None if this one is a repeat."""
        # `logging` serialises the calls of a handler
        previous = self._recent.get(message)
        if previous is not None and 0 <= now - previous[0] < _REPEAT_SECONDS:
            previous[1] += 1
            return None
        self._recent.pop(message, None)
        self._recent[message] = [now, 0]
        if len(self._recent) > _MAX_MESSAGES:
            self._recent.popitem(last=False)
        return int(previous[1]) if previous else 0
