"""The log: one line an event, with the request's id, on standard error."""

import sys
from typing import Any

import structlog

from looseleaf.config import ServerConfig

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def make_log(config: ServerConfig, stream: Any = None) -> Any:
    """A structured logger of this server's own, for a text stream; nothing is set globally."""
    pretty = config.log_format == "console"
    last: Any = (
        structlog.dev.ConsoleRenderer(colors=False)
        if pretty
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *([] if pretty else [structlog.processors.format_exc_info]),
        last,
    ]
    return structlog.wrap_logger(
        structlog.PrintLogger(stream or sys.stderr),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.log_level]),
        cache_logger_on_first_use=True,
    )
