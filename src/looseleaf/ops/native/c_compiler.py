"""The machine's C compiler: which it is, and how it is asked for threads and for what the processor
can do."""

import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from looseleaf.errors import NativeUnavailable

_log = logging.getLogger(__name__)
_SECONDS = 120
# infinities matter (an empty state has lse -inf), so no -ffast-math
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
# one that needs what the kernels need of a compiler and its libraries
_PROBE = """#include <math.h>
#include <stdint.h>
int64_t probe(const double *of, int64_t count) {
    int64_t sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int64_t n = 0; n < count; n++) sum += llrint(exp(of[n]));
    return sum;
}
"""


def find_compiler() -> tuple[str, ...]:
    """The C compiler: ``$CC``, which may have arguments, or cc, gcc, clang. Raises
    NativeUnavailable without one."""
    given = os.environ.get("CC")
    # a path may have spaces
    wanted = [(given,), tuple(given.split())] if given else [("cc",), ("gcc",), ("clang",)]
    for name, *arguments in filter(None, wanted):
        if found := shutil.which(name):
            return found, *arguments
    names = given or ", ".join(name for name, *_ in wanted)
    raise NativeUnavailable(
        f"no C compiler ({names}): install gcc or clang, or choose cpu_kernels='torch'",
        "cpu_kernels",
    )


def vector_lanes() -> int:
    """Floats in the processor's widest vector."""
    # an emulated ARM machine may see the features of the host's processor
    features = processor() if _is_x86() else ""
    return 16 if "avx512f" in features else 8 if "avx2" in features else 4


class Way(NamedTuple):
    """How threads and the processor's own instructions are asked for: not every compiler knows how
    to do either."""

    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    threads: bool


def ways() -> list[Way]:
    """The best first."""
    openmp = [Way(("-fopenmp",), _openmp_libraries("libgomp*.so*"), True)]
    if sys.platform == "darwin" and (libraries := _openmp_libraries("libomp*.dylib")):
        # Apple's clang has OpenMP, but no library and no flag of the driver for it
        found = tuple(f"-Wl,-rpath,{Path(library).parent}" for library in libraries)
        openmp.append(Way(("-Xclang", "-fopenmp"), (*libraries, *found), True))
    openmp += [Way(("-fopenmp-simd",), (), False), Way((), (), False)]
    tuned, plain = _tuning(), ()
    every = [(way, tuning) for way in openmp for tuning in dict.fromkeys((tuned, plain))]
    return [way._replace(flags=(*way.flags, *tuning)) for way, tuning in every]


def _tuning() -> tuple[str, ...]:
    if _is_x86():
        wide = ("-mprefer-vector-width=512",) if "avx512" in processor() else ()
        return "-march=native", *wide
    return ("-mcpu=native",) if platform.machine().lower() in ("arm64", "aarch64") else ()


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _openmp_libraries(pattern: str) -> tuple[str, ...]:
    """PyTorch's own OpenMP runtime, so that one pool of threads serves both; two would fight."""
    root = Path(torch.__file__).parent
    for folder in (root / "lib", root.parent / "torch.libs"):
        for path in sorted(folder.glob(pattern)):
            return (str(path),)
    return ()


@cache
def way_of(compiler: tuple[str, ...]) -> Way:
    """The best way that the compiler goes."""
    refusal = None
    with tempfile.TemporaryDirectory() as folder:
        for way in ways():
            try:
                compile_library(compiler, way, FLAGS, _PROBE, Path(folder) / "probe.so")
            except NativeUnavailable as error:
                refusal = refusal or error
                continue
            if not way.threads:
                _log.warning(
                    "the CPU kernels use one thread: %s has no OpenMP; install it (libomp, for "
                    "clang) or name a compiler that has it in $CC", compiler[0],
                )  # fmt: skip
            return way
    assert refusal is not None, "there is a way to try"
    raise refusal


def compile_library(
    compiler: Sequence[str], way: Way, flags: Sequence[str], source: str, path: Path
) -> None:
    """Make the library of a C ``source`` at ``path``, whose folder is there. Raises
    NativeUnavailable if the compiler can't, or the folder can't be written to."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made, c_file = Path(folder) / "kernel.so", Path(folder) / "kernel.c"
            c_file.write_text(source, encoding="utf-8")
            asked = [*compiler, "-std=gnu11", *way.flags, *flags, "-shared", "-fPIC", str(c_file)]
            done = _run([*asked, "-o", str(made), "-lm", *way.libraries])
            if done.returncode != 0:
                raise NativeUnavailable(
                    f"{compiler[0]} can't compile the CPU kernels: "
                    f"{done.stderr.strip()[:500]}\nfix the compiler, name another in $CC, or "
                    "choose cpu_kernels='torch'",
                    "cpu_kernels",
                )
            # another process may have made the same: either is as good
            made.replace(path)
    except OSError as error:
        raise NativeUnavailable(
            f"the CPU kernels can't be compiled in {path.parent}: {error}; set XDG_CACHE_HOME to a "
            "folder that can be written, or choose cpu_kernels='torch'",
            "cpu_kernels",
        ) from error


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        # what a compiler says is in the language of its user, in whatever encoding
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(
            f"{command[0]} can't be run: {error}; name another compiler in $CC, or choose "
            "cpu_kernels='torch'",
            "cpu_kernels",
        ) from error


@cache
def compiler_version(compiler: tuple[str, ...]) -> str:
    """What the compiler says of itself. Raises NativeUnavailable if it can't be run."""
    return _run([*compiler, "--version"]).stdout


@cache
def processor() -> str:
    """What the processor can do: a cache folder may be shared by machines."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
