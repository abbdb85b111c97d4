"""How an option is written: its default with its help text, and the check of its value."""

from dataclasses import field
from typing import Any

from looseleaf.errors import InvalidOption


def require(condition: bool, message: str) -> None:
    """Raise InvalidOption with ``message`` unless ``condition`` holds."""
    if not condition:
        raise InvalidOption(message)


def option(default: Any, help_text: str) -> Any:
    """A field with its default and the help text that command lines show."""
    return field(default=default, metadata={"help": help_text})
