"""Everything that a GPU is asked, in one command: tests, memory checker, benchmarks, a table last.

    python tools/gpu_report.py --out gpu-report --minutes 9
    python tools/gpu_report.py --out gpu-report --only attention,serving
    python tools/gpu_report.py --out gpu-report --device cpu --tiny

Parts run one after another, each with a time limit and a log of its own under ``--out``, where the
rows of results go too. One that fails does not stop the others; the exit code says that one did.
Parts whose command this version does not have are left out.
"""

import argparse
import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# with less than this left a part is not begun
LEAST_SECONDS = 10.0
BENCHMARKS = (
    "attention", "serving", "select", "retro", "fuse", "tiers", "index", "relay", "lazy",
)  # fmt: skip
SANITIZED = "repeated or carried or selected or planned_tiles or turned_ahead"
# what is timed in a test is timed alone
TIMED = "tests/gpu/test_costs.py"
TINY = {
    "attention": ["--longest", "128", "--rows", "4", "--head-dim", "32", "--repetitions", "1"],
    "serving": ["--shape", "tiny", "--repetitions", "1"],
}


@dataclass(frozen=True)
class Part:
    """A command with the seconds that it may take; ``missing`` says why it can't be run."""

    name: str
    command: tuple[str, ...]
    seconds: float
    missing: str = ""


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
    known = benchmark_options()
    for name in BENCHMARKS:
        if name not in known:
            found.append(Part(name, (), 0.0, "this version has no such command"))
            continue
        options = TINY.get(name, []) if tiny else []
        given = {"--device": device, "--output": str(out / f"{name}.csv")}
        for option, value in given.items():
            if option in known[name]:
                options = [*options, option, value]
        command = (python, "-m", "looseleaf.cli", "bench", name, *options)
        found.append(Part(name, command, 240.0 if name in ("attention", "serving") else 120.0))
    return found


def benchmark_options() -> dict[str, set[str]]:
    """The options of every benchmark that this version has."""
    from looseleaf.cli.bench import bench

    return {
        name: {flag for parameter in command.params for flag in parameter.opts}
        for name, command in bench.commands.items()
    }


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
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            state = "too slow"
    return Outcome(part.name, state, time.monotonic() - start, last_line(log))


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [
        line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    said = [line for line in lines if line]
    return said[-1][:100] if said else ""


def figures(path: Path, limit: int = 60) -> list[str]:
    """The latest rows of a benchmark, a line for each thing measured; arms of one share a line, in
    times of ours."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[-4 * limit :]
    by_name: dict[str, dict[str, dict[str, str]]] = {}
    lines = []
    for row in rows:
        if row.get("arm"):
            by_name.setdefault(row["measurement"], {})[row["arm"]] = row
        elif row.get("looseleaf"):
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


def report(outcomes: Sequence[Outcome], out: Path) -> list[str]:
    """Figures of all parts that have some, then a line for each part."""
    lines = [line for outcome in outcomes for line in figures(out / f"{outcome.name}.csv")]
    lines.append(f"{'part':10} {'state':9} {'seconds':>7}  last words")
    lines += [f"{o.name:10} {o.state:9} {o.seconds:7.1f}  {o.last_line}" for o in outcomes]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for; 1 if one of them failed, was too slow or was not begun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and logs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--only", default="", help="names of parts, with commas between")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the command itself")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    every = parts(asked.device, asked.out.resolve(), asked.tiny)
    names = [name for name in asked.only.split(",") if name] or [part.name for part in every]
    unknown = sorted(set(names) - {part.name for part in every})
    if unknown:
        parser.error(f"no part {', '.join(unknown)}: there are {', '.join(p.name for p in every)}")
    end, outcomes = time.monotonic() + 60 * asked.minutes, []
    for part in every:
        if part.name in names:
            outcomes.append(run(part, asked.out, end - time.monotonic()))
            print(f"{outcomes[-1].name}: {outcomes[-1].state}", file=sys.stderr, flush=True)
    print("\n".join(report(outcomes, asked.out)))
    return int(any(outcome.is_bad for outcome in outcomes))


if __name__ == "__main__":
    # a machine with a GPU may have nothing of ours installed
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
