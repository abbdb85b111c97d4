"""``bench llamacpp``: Looseleaf and llama.cpp in turn, on GGUF files of equal bits.

Each file and number of threads has a process of its own, because OpenMP reads its settings when a
process starts. llama.cpp writes the other forms of a file to a temporary folder."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.llamacpp.case import PARTS, FileCase
from looseleaf_lab.bench.llamacpp.forms import FORMS, bindings, convert
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.results import Row
from looseleaf_lab.errors import BenchmarkRefused

__all__ = ["FORMS", "PARTS", "LlamaCppConfig", "measure"]

AS_IS = "as it is"


@dataclass(frozen=True)
class LlamaCppConfig:
    """GGUF files, the forms of each (`AS_IS` or one of `FORMS`), and numbers of threads."""

    models: tuple[Path, ...]
    forms: tuple[str, ...] = (AS_IS,)
    threads: tuple[int, ...] = (1, 2)
    repetitions: int = 5
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        missing = [str(path) for path in self.models if not path.is_file()]
        if missing or not self.models:
            raise InvalidOption(f"no GGUF file at {', '.join(missing) or 'no path'}")
        if min(self.threads) < 1:
            raise InvalidOption("--threads must be positive")


def measure(config: LlamaCppConfig, progress: Progress = SILENT) -> Iterator[Row]:
    """Rows as they are measured.

    Raises InvalidOption without llama-cpp-python, and BenchmarkRefused if a process fails."""
    bindings()
    pairs = [(model, form) for model in config.models for form in config.forms]
    with tempfile.TemporaryDirectory() as scratch:
        for model, form in progress.over(pairs, lambda pair: f"{pair[0].name}, {pair[1]}"):
            path = model if form == AS_IS else convert(model, form, Path(scratch))
            for threads in progress.over(config.threads, lambda n: f"{n} threads"):
                case = FileCase(
                    model.stem, str(path), form, threads, config.repetitions, parts=config.parts
                )
                yield from _in_process(case)
            if form != AS_IS:
                path.unlink()


def _in_process(case: FileCase) -> Iterator[Row]:
    command = [sys.executable, "-m", __name__, json.dumps(asdict(case))]
    environment = os.environ | {"OMP_NUM_THREADS": str(case.threads)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise BenchmarkRefused(f"the process for {case.model}, {case.form} failed")
