"""All tests, memory checks and benchmarks of a GPU in one command, with a table at the end.

    python tools/gpu_report.py --out gpu-report --minutes 9
    python tools/gpu_report.py --out gpu-report --only attention,serving
    python tools/gpu_report.py --out gpu-report --only claims --minutes 25
    python tools/gpu_report.py --out gpu-report --device cpu --tiny

Parts run sequentially, each with a time limit. Logs and result rows are under ``--out``; a part
that exceeds its limit keeps its rows. A failure does not stop the other parts; it sets the exit
code. The last line is the command for the remaining parts. ``claims`` are the GPU benchmarks of
docs/claims.md; tools/draw_claims.py adds their rows to results/ and redraws that page's pictures.
"""

import argparse
import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
# least remaining time to start a part
LEAST_SECONDS = 10.0
SANITIZED = "repeated or carried or selected or planned_tiles or turned_ahead"
# timed tests run separately
TIMED = "tests/gpu/test_costs.py"
# between SIGINT and SIGKILL
GRACE_SECONDS = 15.0
CLAIMS = "claims"


@dataclass(frozen=True)
class Benchmark:
    """A ``looseleaf`` command with a limit of ``seconds``.

    ``tiny`` is the command with toy sizes, empty if it needs a GPU. ``claim`` means that it
    measures a claim of a paper."""

    name: str
    command: str
    seconds: float
    tiny: str = ""
    claim: bool = True


_8B = "--shape llama-3.1-8b"
_SHARES = (
    "--ratio 0.05 --ratio 0.15 --ratio 0.18 --place device --place host --repetitions 3 --batches 0"
)
_TINY_FUSE = (
    "bench fuse --shape tiny --documents 2 --document-tokens 32 --stored 2 --selector random "
    "--ratio 0.05 --ratio 0.18 --place device --place host --repetitions 1 --batches 0"
)
_TINY_RATE = (
    "bench rate --shape tiny --documents 4 --document-tokens 32 --per-request 2 --fuse question "
    "--repetitions 1"
)
_TINY_RELAY = "bench relay --shape tiny --heads 2 2 16 --prefix 16 --requests 2 --repetitions 1"
BENCHMARKS = (
    Benchmark(
        "attention", "bench attention", 240.0,
        "bench attention --longest 128 --rows 4 --head-dim 32 --repetitions 1", claim=False,
    ),
    Benchmark(
        "serving", "bench serving", 240.0, "bench serving --shape tiny --repetitions 1", claim=False
    ),
    Benchmark(
        "relay-rate", "bench relay --part rate --prefix 64 --prefix 512", 180.0,
        f"{_TINY_RELAY} --part rate --rate-seconds 0.02",
    ),
    Benchmark(
        "fuse-short", f"bench fuse {_8B} --documents 6 --document-tokens 512 {_SHARES}", 120.0,
        _TINY_FUSE,
    ),
    Benchmark(
        "fuse-long",
        f"bench fuse {_8B} --stored 5 --selector random --selector question --selector deviation "
        f"{_SHARES}", 150.0,
        _TINY_FUSE,
    ),
    Benchmark(
        "rate", "bench rate --part rates", 240.0,
        f"{_TINY_RATE} --part rates --rate 2 --rate 100000 --arrivals 2 --hold 0 --longest 0",
    ),
    Benchmark(
        "tiers", f"bench tiers {_8B} --document-tokens 2048 --repetitions 3", 240.0,
        "bench tiers --shape small --documents 2 --document-tokens 32 --repetitions 1",
    ),
    Benchmark(
        "select",
        f"bench select {_8B} --context 8176 --batch 1 --batch 8 --batch 16 --batch 32 --batch 64 "
        "--window 2 --window 8 --repetitions 3", 240.0,
        "bench select --shape small --budget 64 --context 160 --batch 1 --batch 2 --window 2 "
        "--new-tokens 3 --repetitions 1",
    ),
    Benchmark(
        "conformance", "conformance --dtype float32", 180.0,
        "conformance --dtype float32 --law 1 --tokens 160",
    ),
    Benchmark("rate-sizes", "bench rate --part sizes", 200.0, f"{_TINY_RATE} --part sizes"),
    Benchmark(
        "relay", "bench relay --part operator --part throughput --part few-shot", 240.0,
        f"{_TINY_RELAY} --part operator --batch 2",
    ),
    Benchmark(
        "lazy", "bench lazy", 200.0,
        "bench lazy --shape tiny --documents 8 --document-tokens 32 --capacity 6 --requests 12 "
        "--alpha 2.1 --repetitions 1",
    ),
    Benchmark(
        "hosted", "bench hosted --context 131072 --distinct 2 --copies 8", 300.0
    ),
    Benchmark(
        "hosted-1m", "bench hosted --context 102400 --context 1048576 --index graph --layers 8 "
        "--distinct 1 --copies 8", 300.0,
    ),
    Benchmark(
        "select-long",
        f"bench select {_8B} --context 32640 --context 130560 --window 2 --window 8", 240.0,
        "bench select --shape small --budget 64 --context 320 --window 2 --new-tokens 3 "
        "--repetitions 1",
    ),
    Benchmark(
        "generate", "bench generate", 200.0,
        "bench generate --prompt-tokens 40 --document-tokens 20 --batch 1 --new-tokens 2 "
        "--repetitions 1", claim=False,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A command with a limit of ``seconds`` and the file of its rows.

    ``missing`` is the reason if it can't run."""

    name: str
    command: tuple[str, ...]
    seconds: float
    missing: str = ""
    rows: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of a part: ``ok``, ``failed``, ``too slow``, ``not run`` or ``missing``."""

    name: str
    state: str
    seconds: float
    last_line: str

    @property
    def is_bad(self) -> bool:
        return self.state in ("failed", "too slow", "not run")


def parts(device: str, out: Path, tiny: bool) -> list[Part]:
    """All parts, the most important first."""
    python = sys.executable
    alone = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = [*alone, "tests/gpu", "--ignore", TIMED]
    # most of the time is compilation on CPUs
    parallel = ["-n", "6"] if find_spec("xdist") is not None else []
    # pytest-benchmark warns under xdist, and warnings are errors
    parallel += ["-p", "no:benchmark"]
    checker = shutil.which("compute-sanitizer")
    memcheck = (checker or "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    checks = [
        Part("tests", (*tests, *parallel), 300.0),
        Part("costs", (*alone, "-s", TIMED), 120.0),
        Part(
            "memcheck",
            (*memcheck, *tests, "-k", SANITIZED),
            120.0,
            "" if checker else "compute-sanitizer is not on PATH",
        ),
    ]
    return checks + [benchmark_part(benchmark, device, out, tiny) for benchmark in BENCHMARKS]


def benchmark_part(benchmark: Benchmark, device: str, out: Path, tiny: bool) -> Part:
    """The part of a benchmark on ``device``, with its rows in ``out``."""
    words = (benchmark.tiny if tiny else benchmark.command).split()
    if not words:
        return Part(benchmark.name, (), 0.0, "has no toy sizes: it needs a GPU and its time")
    known, rows = options_of(words), None
    if "--device" in known:
        words += ["--device", device]
    if "--output" in known:
        rows = out / f"{words[1]}.csv"
        words += ["--output", str(rows)]
    command = (sys.executable, "-m", "looseleaf", *words)
    return Part(benchmark.name, command, benchmark.seconds, rows=rows)


def options_of(words: Sequence[str]) -> set[str]:
    """The flags of the command in ``words``."""
    return {flag for parameter in find_command(words)[0].params for flag in parameter.opts}


def find_command(words: Sequence[str]) -> tuple[click.Command, list[str]]:
    """The command in ``words``, and its arguments."""
    from looseleaf.cli import app

    command: click.Command | None = app
    rest = [*words]
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), rest.pop(0))
    assert command is not None, f"there is no command {' '.join(words[:2])}"
    return command, rest


def run(part: Part, out: Path, seconds_left: float) -> Outcome:
    """Run ``part`` in a new process group, which ends at the time limit."""
    if part.missing:
        return Outcome(part.name, "missing", 0.0, part.missing)
    if seconds_left < LEAST_SECONDS:
        return Outcome(part.name, "not run", 0.0, "no time left: run it alone with --only")
    log, start = out / f"{part.name}.log", time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "160"}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            part.command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(min(part.seconds, seconds_left))
            state = "ok" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            end_group(process)
            state = "too slow"
    return Outcome(part.name, state, time.monotonic() - start, last_line(log))


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process group: first by SIGINT, so that it can write its results."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    """The last line of a log that is not blank, shortened."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    stripped = [line.strip() for line in lines if line.strip()]
    return stripped[-1][:100] if stripped else ""


def figures(path: Path, limit: int = 60) -> list[str]:
    """The latest rows of a benchmark, a line per measurement; arms of ``bench attention`` share a
    line, relative to Looseleaf's time."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[-4 * limit :]
    by_name: dict[str, dict[str, dict[str, str]]] = {}
    lines = []
    for row in rows:
        if "share_of_roofline" in row:
            by_name.setdefault(row["measurement"], {})[row["arm"]] = row
        elif "roofline_share" in row:
            shares = f", floor {row['floor']}, {row['roofline_share']} of the roofline"
            lines.append(f"{row['measurement']}: {row['looseleaf']} {row['unit']}{shares}")
        else:
            lines.append(", ".join(f"{key} {value}" for key, value in list(row.items())[6:]))
    for name, arms in by_name.items():
        if (ours := arms.get("looseleaf")) is None:
            continue
        times = [
            f"{arm} x{float(row['median']) / float(ours['median']):.3f}"
            for arm, row in arms.items()
            if arm != "looseleaf"
        ]
        share = ours.get("share_of_roofline", "")
        lines.append(f"{name}: {ours['median']} {ours['unit']} ({share}); {', '.join(times)}")
    return [f"{path.stem}: {line}" for line in lines[-limit:]]


def report(outcomes: Sequence[Outcome], files: Iterable[Path]) -> list[str]:
    """The figures of all files, a line for each part, and the command for the remaining parts."""
    lines = [line for path in dict.fromkeys(files) for line in figures(path)]
    lines.append(f"{'part':12} {'state':9} {'seconds':>7}  last words")
    lines += [f"{o.name:12} {o.state:9} {o.seconds:7.1f}  {o.last_line}" for o in outcomes]
    if remaining := [o.name for o in outcomes if o.state in ("too slow", "not run")]:
        lines.append(f"left to run: make gpu-report ONLY={','.join(remaining)}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected parts; returns 1 if a part failed, was too slow or did not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and logs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--only", default="", help="names of parts, commas between; claims")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the command itself")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    all_parts = parts(options.device, options.out.resolve(), options.tiny)
    names = {name for name in options.only.split(",") if name} or {part.name for part in all_parts}
    if CLAIMS in names:
        names = names - {CLAIMS} | {benchmark.name for benchmark in BENCHMARKS if benchmark.claim}
    if unknown := sorted(names - {part.name for part in all_parts}):
        known = ", ".join([*(p.name for p in all_parts), CLAIMS])
        parser.error(f"no part {', '.join(unknown)}: there are {known}")
    # shells ignore SIGINT in background jobs, and parts inherit that; they need SIGINT to end
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end, outcomes = time.monotonic() + 60 * options.minutes, []
    for part in all_parts:
        if part.name in names:
            outcomes.append(run(part, options.out, end - time.monotonic()))
            print(f"{outcomes[-1].name}: {outcomes[-1].state}", file=sys.stderr, flush=True)
    files = [part.rows for part in all_parts if part.name in names and part.rows is not None]
    print("\n".join(report(outcomes, files)))
    return int(any(outcome.is_bad for outcome in outcomes))


if __name__ == "__main__":
    # the package may not be installed
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
