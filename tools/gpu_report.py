"""Everything that a GPU is asked, in one command: tests, memory checker, benchmarks, a table last.

    python tools/gpu_report.py --out gpu-report --minutes 9
    python tools/gpu_report.py --out gpu-report --only attention,serving
    python tools/gpu_report.py --out gpu-report --only claims --minutes 25
    python tools/gpu_report.py --out gpu-report --device cpu --tiny

Parts run one after another, each with a time limit and a log of its own under ``--out``, where the
rows of results go too: a part that is cut keeps those that it had. One that fails does not stop the
others; the exit code says that one did, and the last line how to run what is left. ``claims`` are
the parts that docs/claims.md quotes from a GPU, those that it lacks first; tools/draw_claims.py
adds their rows to results/ and draws the pictures of that page again.
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
# with less than this left a part is not begun
LEAST_SECONDS = 10.0
SANITIZED = "repeated or carried or selected or planned_tiles or turned_ahead"
# what is timed in a test is timed alone
TIMED = "tests/gpu/test_costs.py"
# for a part that is asked to end, until it is ended
GRACE_SECONDS = 15.0
CLAIMS = "claims"


@dataclass(frozen=True)
class Measured:
    """A ``looseleaf`` command, the seconds that it may take, and what it is called with at toy
    sizes: nothing if it needs a GPU. ``claim``: it measures what a paper claims."""

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
MEASURED = (
    Measured(
        "attention", "bench attention", 240.0,
        "bench attention --longest 128 --rows 4 --head-dim 32 --repetitions 1", claim=False,
    ),
    Measured(
        "serving", "bench serving", 240.0, "bench serving --shape tiny --repetitions 1", claim=False
    ),
    Measured(
        "relay-rate", "bench relay --part rate --prefix 64 --prefix 512", 180.0,
        f"{_TINY_RELAY} --part rate --rate-seconds 0.02",
    ),
    Measured(
        "fuse-short", f"bench fuse {_8B} --documents 6 --document-tokens 512 {_SHARES}", 120.0,
        _TINY_FUSE,
    ),
    Measured(
        "fuse-long",
        f"bench fuse {_8B} --stored 5 --selector random --selector question --selector deviation "
        f"{_SHARES}", 150.0,
        _TINY_FUSE,
    ),
    Measured(
        "rate", "bench rate --part rates", 240.0,
        f"{_TINY_RATE} --part rates --rate 2 --rate 100000 --arrivals 2 --hold 0 --longest 0",
    ),
    Measured(
        "tiers", f"bench tiers {_8B} --document-tokens 2048 --repetitions 3", 240.0,
        "bench tiers --shape small --documents 2 --document-tokens 32 --repetitions 1",
    ),
    Measured(
        "select",
        f"bench select {_8B} --context 8176 --batch 1 --batch 8 --batch 16 --batch 32 --batch 64 "
        "--window 2 --window 8 --repetitions 3", 240.0,
        "bench select --shape small --budget 64 --context 160 --batch 1 --batch 2 --window 2 "
        "--new-tokens 3 --repetitions 1",
    ),
    Measured(
        "conformance", "conformance --dtype float32", 180.0,
        "conformance --dtype float32 --law 1 --tokens 160",
    ),
    Measured("rate-sizes", "bench rate --part sizes", 200.0, f"{_TINY_RATE} --part sizes"),
    Measured(
        "relay", "bench relay --part operator --part throughput --part few-shot", 240.0,
        f"{_TINY_RELAY} --part operator --batch 2",
    ),
    Measured(
        "lazy", "bench lazy", 200.0,
        "bench lazy --shape tiny --documents 8 --document-tokens 32 --capacity 6 --requests 12 "
        "--alpha 2.1 --repetitions 1",
    ),
    Measured(
        "hosted", "bench hosted --context 131072 --distinct 2 --copies 8", 300.0
    ),
    Measured(
        "hosted-1m", "bench hosted --context 102400 --context 1048576 --index graph --layers 8 "
        "--distinct 1 --copies 8", 300.0,
    ),
    Measured(
        "select-long",
        f"bench select {_8B} --context 32640 --context 130560 --window 2 --window 8", 240.0,
        "bench select --shape small --budget 64 --context 320 --window 2 --new-tokens 3 "
        "--repetitions 1",
    ),
    Measured(
        "generate", "bench generate", 200.0,
        "bench generate --prompt-tokens 40 --document-tokens 20 --batch 1 --new-tokens 2 "
        "--repetitions 1", claim=False,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A command with the seconds that it may take, and the file of its rows; ``missing`` says why
    it can't be run."""

    name: str
    command: tuple[str, ...]
    seconds: float
    missing: str = ""
    rows: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How a part ended: ``ok``, ``failed``, ``too slow``, ``not run`` or ``missing``."""

    name: str
    state: str
    seconds: float
    last_line: str

    @property
    def is_bad(self) -> bool:
        return self.state in ("failed", "too slow", "not run")


def parts(device: str, out: Path, tiny: bool) -> list[Part]:
    """What there is to run, in the order of its worth."""
    python = sys.executable
    alone = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = [*alone, "tests/gpu", "--ignore", TIMED]
    # compiling is most of the time, and takes no GPU
    side_by_side = ["-n", "6"] if find_spec("xdist") is not None else []
    # which warns, and so fails, beside the other plugin
    side_by_side += ["-p", "no:benchmark"]
    checker = shutil.which("compute-sanitizer")
    memcheck = (checker or "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    found = [
        Part("tests", (*tests, *side_by_side), 300.0),
        Part("costs", (*alone, "-s", TIMED), 120.0),
        Part(
            "memcheck",
            (*memcheck, *tests, "-k", SANITIZED),
            120.0,
            "" if checker else "compute-sanitizer is not on PATH",
        ),
    ]
    return found + [measured(one, device, out, tiny) for one in MEASURED]


def measured(one: Measured, device: str, out: Path, tiny: bool) -> Part:
    """A command as a part: on ``device``, its rows in ``out``."""
    words = (one.tiny if tiny else one.command).split()
    if not words:
        return Part(one.name, (), 0.0, "has no toy sizes: it needs a GPU and its time")
    known, rows = options_of(words), None
    if "--device" in known:
        words += ["--device", device]
    if "--output" in known:
        rows = out / f"{words[1]}.csv"
        words += ["--output", str(rows)]
    return Part(one.name, (sys.executable, "-m", "looseleaf", *words), one.seconds, rows=rows)


def options_of(words: Sequence[str]) -> set[str]:
    """The options of the command that these words call."""
    return {flag for parameter in find_command(words)[0].params for flag in parameter.opts}


def find_command(words: Sequence[str]) -> tuple[click.Command, list[str]]:
    """The command that these words call, and what is left for it."""
    from looseleaf.cli import app

    command: click.Command | None = app
    rest = [*words]
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), rest.pop(0))
    assert command is not None, f"there is no command {' '.join(words[:2])}"
    return command, rest


def run(part: Part, out: Path, seconds_left: float) -> Outcome:
    """Run ``part`` in a process group of its own, which is ended when its time is over."""
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
    """End a process and those it began: asked first, so that it keeps what it has measured."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [
        line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    said = [line for line in lines if line]
    return said[-1][:100] if said else ""


def figures(path: Path, limit: int = 60) -> list[str]:
    """The latest rows of a benchmark, a line for each thing measured; arms of ``bench attention``
    share a line, in times of ours."""
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
    """Figures in all files of rows, a line for each part, and how to run what is left."""
    lines = [line for path in dict.fromkeys(files) for line in figures(path)]
    lines.append(f"{'part':12} {'state':9} {'seconds':>7}  last words")
    lines += [f"{o.name:12} {o.state:9} {o.seconds:7.1f}  {o.last_line}" for o in outcomes]
    if left := [o.name for o in outcomes if o.state in ("too slow", "not run")]:
        lines.append(f"left to run: make gpu-report ONLY={','.join(left)}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for; 1 if one of them failed, was too slow or was not begun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and logs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--only", default="", help="names of parts, commas between; claims")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the command itself")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    every = parts(asked.device, asked.out.resolve(), asked.tiny)
    names = {name for name in asked.only.split(",") if name} or {part.name for part in every}
    if CLAIMS in names:
        names = names - {CLAIMS} | {one.name for one in MEASURED if one.claim}
    if unknown := sorted(names - {part.name for part in every}):
        known = ", ".join([*(p.name for p in every), CLAIMS])
        parser.error(f"no part {', '.join(unknown)}: there are {known}")
    # also where this was begun in the background: parts are asked to end by it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end, outcomes = time.monotonic() + 60 * asked.minutes, []
    for part in every:
        if part.name in names:
            outcomes.append(run(part, asked.out, end - time.monotonic()))
            print(f"{outcomes[-1].name}: {outcomes[-1].state}", file=sys.stderr, flush=True)
    files = [part.rows for part in every if part.name in names and part.rows is not None]
    print("\n".join(report(outcomes, files)))
    return int(any(outcome.is_bad for outcome in outcomes))


if __name__ == "__main__":
    # a machine with a GPU may have nothing of ours installed
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
