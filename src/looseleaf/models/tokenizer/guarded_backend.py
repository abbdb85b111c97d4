"""A tokenizer's backend whose texts are encoded in a process under limits.

It stands for the library's own where a tokenizer has parts that may take exponential time. What it
says of its vocabulary is answered here."""

from collections.abc import Callable
from typing import Any

from looseleaf.sandbox import Limits, Sandbox

_SECONDS, _SECONDS_PER_CHARACTER = 2.0, 5e-6
_MIB, _CHARACTERS_PER_MIB, _MOST_MIB = 512, 1 << 12, 4096


def make_sandbox(sources: Callable[[], list[str]]) -> Sandbox:
    """The processes that encode texts by these ``tokenizer.json`` sources."""
    return Sandbox(
        "encoding",
        lambda: {"sources": sources()},
        what="tokenizer",
        subject="this model's tokenizer",
        advice="shorten the text, or mend the patterns in tokenizer.json",
    )


class GuardedBackend:
    """``backend``, which was read from source ``number`` of those that the sandbox has."""

    def __init__(self, backend: Any, sandbox: Sandbox, number: int, markers_are_text: bool) -> None:
        self._backend, self._sandbox = backend, sandbox
        self._about = {"source": number, "markers_are_text": markers_are_text}

    def ids(self, text: str) -> list[int]:
        """The ids of ``text``. Raises InvalidRequest, and LimitExceeded."""
        ids: list[int] = self._call(text, "ids")
        return ids

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """Each id of ``text`` with the bounds of its characters. Raises as `ids`."""
        return [(token_id, start, end) for token_id, start, end in self._call(text, "spans")]

    def _call(self, text: str, form: str) -> Any:
        seconds = _SECONDS + _SECONDS_PER_CHARACTER * len(text)
        mib = min(_MIB + len(text) // _CHARACTERS_PER_MIB, _MOST_MIB)
        limits = Limits(round(seconds, 1), mib)
        return self._sandbox.call({**self._about, "text": text, "form": form}, limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)
