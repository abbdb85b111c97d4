"""Typed access to a container's metadata; errors name the field."""

from typing import Any

import numpy as np

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models.checkpoint.fields import shown
from looseleaf.models.checkpoint.gguf.container import Container, Strings


class Metadata:
    """The metadata of a container. ``own`` prefixes a key with the architecture's name.

    Raises CorruptCheckpoint for a missing field without a default, and for a wrong type."""

    def __init__(self, container: Container) -> None:
        self._values, self._path = container.metadata, container.path
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def own(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        # some converters store one count per layer
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(key, "a whole number", value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def strings(self, key: str) -> list[str]:
        value = self._get(key)
        if not isinstance(value, Strings):
            raise self._wrong(key, "an array of strings", value)
        return list(value)

    def count(self, key: str) -> int:
        """Length of an array of strings."""
        value = self._get(key)
        if not isinstance(value, Strings):
            raise self._wrong(key, "an array of strings", value)
        return len(value)

    def numbers(self, key: str) -> list[Any]:
        value = self._get(key)
        if not isinstance(value, np.ndarray):
            raise self._wrong(key, "an array of numbers", value)
        return list(value.tolist())

    def _get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise CorruptCheckpoint(f"{self._path} lacks the field {key}; convert it again")
        return value

    def _wrong(self, key: str, form: str, value: object) -> CorruptCheckpoint:
        kind = "an array" if isinstance(value, np.ndarray | Strings) else shown(value)
        return CorruptCheckpoint(f"{self._path}: {key} must be {form}, not {kind}")
