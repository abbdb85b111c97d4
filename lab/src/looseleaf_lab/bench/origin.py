"""The origin of a figure: commit, date, hardware, versions; the first columns of result rows."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def describe_origin() -> dict[str, str]:
    """The columns of a measurement's date, code and machine."""
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "hardware": _hardware(),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "transformers_version": _version("transformers"),
    }


def _commit() -> str:
    # a copy without history has no other source
    if commit := os.environ.get("LOOSELEAF_COMMIT"):
        return commit
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        # rows that an earlier run appended do not change the code
        changed = _git(
            "status", "--porcelain", "--untracked-files=no", ":/", ":(top,exclude)results"
        )
    except (OSError, subprocess.CalledProcessError):
        return f"looseleaf {_version('looseleaf')}"
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    result = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True, cwd=folder
    )
    return result.stdout.strip()


def _hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
