"""One engine in a new process: its first token, and the process's most memory.

Run as ``python start.py ENGINE MODEL THREADS``. It prints a line at
the first token, then bytes. The caller measures time from the process's start."""

import resource
import subprocess
import sys
import time
from pathlib import Path

from looseleaf_lab.errors import BenchmarkRefused

_PROMPT = tuple(range(300, 316))


def measure_start(engine: str, model: Path, threads: int) -> tuple[float, float]:
    """Seconds from a process's start to a first token, and its most memory in MiB.

    Raises BenchmarkRefused if the process fails."""
    command = [sys.executable, __file__, engine, str(model), str(threads)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
        rest = process.stdout.read()
    if process.returncode or not line:
        raise BenchmarkRefused(f"{engine} did not start with {model.name}")
    return seconds, int(rest) / 2**20


def main(engine: str, model: str, threads: str) -> None:
    """The first token of a short prompt."""
    if engine == "looseleaf":
        from looseleaf import LLM, SamplingParams
        from looseleaf.prompt.request import Request, TextPart

        core = LLM(model, device="cpu").engine
        core.add(Request("start", (TextPart(_PROMPT),), SamplingParams(max_tokens=1)))
        while core.has_work:
            core.step()
    else:
        from looseleaf_lab.bench.llamacpp.peer import LlamaCpp

        LlamaCpp(Path(model), 512, 1, int(threads)).prefill(_PROMPT)
    # a write of its own: the first line ends the measured time
    sys.stdout.write("token\n")
    sys.stdout.flush()
    sys.stdout.write(str(most_bytes()))


def most_bytes() -> int:
    """The most memory of this process. Of a new process, Linux counts its parent's in rusage."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(*sys.argv[1:])
