"""The work of one process of ``bench llamacpp``: a file, a number of threads, and parts."""

from dataclasses import dataclass

PARTS = ("decode", "batch", "prefill", "documents", "start")


@dataclass(frozen=True)
class FileCase:
    """A file, the name of its form, a number of threads, and the measured parts."""

    model: str
    path: str
    form: str
    threads: int
    repetitions: int = 5
    steps: int = 24
    parts: tuple[str, ...] = PARTS
