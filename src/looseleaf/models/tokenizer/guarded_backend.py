"""A tokenizer backend that encodes texts in a process under limits.

It replaces the library's backend if parts of a tokenizer may take exponential time. Lookups in the
vocabulary run in this process."""

from collections.abc import Callable
from typing import Any

from looseleaf.sandbox import Limits, Sandbox

_SECONDS, _SECONDS_PER_CHARACTER = 2.0, 5e-6
_MIB, _CHARACTERS_PER_MIB, _MAX_MIB = 512, 1 << 12, 4096


def make_sandbox(sources: Callable[[], list[str]]) -> Sandbox:
    """The processes that encode texts with these ``tokenizer.json`` sources."""
    return Sandbox(
        "encoding",
        lambda: {"sources": sources()},
        what="tokenizer",
        subject="this model's tokenizer",
        advice="shorten the text, or mend the patterns in tokenizer.json",
    )


class GuardedBackend:
    """``backend`` behind a sandbox; ``number`` is the index of its source there."""

    def __init__(self, backend: Any, sandbox: Sandbox, number: int, markers_are_text: bool) -> None:
        self._backend, self._sandbox = backend, sandbox
        self._variant = {"source": number, "markers_are_text": markers_are_text}

    def ids(self, text: str) -> list[int]:
        """The ids of ``text``. Raises InvalidRequest and LimitExceeded."""
        ids: list[int] = self._call(text, "ids")
        return ids

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """Each id of ``text`` with its first and end character. Raises as `ids`."""
        return [(token_id, start, end) for token_id, start, end in self._call(text, "spans")]

    def _call(self, text: str, form: str) -> Any:
        seconds = _SECONDS + _SECONDS_PER_CHARACTER * len(text)
        mib = min(_MIB + len(text) // _CHARACTERS_PER_MIB, _MAX_MIB)
        limits = Limits(round(seconds, 1), mib)
        return self._sandbox.call({**self._variant, "text": text, "form": form}, limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)
