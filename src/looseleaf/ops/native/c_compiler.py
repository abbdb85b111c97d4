"""Finds the machine's C compiler and the flags it accepts for threads and vector instructions."""

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
_TIMEOUT_S = 120
# No -ffast-math: an empty state has an lse of -inf.
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
# uses the headers, OpenMP and libraries that the kernels use
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
    """The C compiler as a command: ``$CC`` with its arguments, else cc, gcc or clang.

    Raises NativeUnavailable if none is installed."""
    cc_variable = os.environ.get("CC")
    # $CC is a path with spaces, or a command with arguments
    candidates = (
        [(cc_variable,), tuple(cc_variable.split())]
        if cc_variable
        else [("cc",), ("gcc",), ("clang",)]
    )
    for name, *arguments in filter(None, candidates):
        if path := shutil.which(name):
            return path, *arguments
    names = cc_variable or ", ".join(name for name, *_ in candidates)
    raise NativeUnavailable(
        f"no C compiler ({names}): install gcc or clang, or choose cpu_kernels='torch'",
        "cpu_kernels",
    )


def vector_lanes() -> int:
    """Number of floats in the processor's widest vector register."""
    # an emulated ARM machine may list the features of its x86 host
    features = processor_features() if _is_x86() else ""
    return 16 if "avx512f" in features else 8 if "avx2" in features else 4


class CompilerOptions(NamedTuple):
    """Flags and libraries for OpenMP and native instructions; ``threads``: OpenMP is enabled."""

    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    threads: bool


def option_candidates() -> list[CompilerOptions]:
    """Options for OpenMP and native instructions, fastest first."""
    openmp = [CompilerOptions(("-fopenmp",), _openmp_libraries("libgomp*.so*"), True)]
    if sys.platform == "darwin" and (libraries := _openmp_libraries("libomp*.dylib")):
        # Apple's clang has OpenMP, but neither its library nor a driver flag
        run_paths = tuple(f"-Wl,-rpath,{Path(library).parent}" for library in libraries)
        openmp.append(CompilerOptions(("-Xclang", "-fopenmp"), (*libraries, *run_paths), True))
    openmp += [CompilerOptions(("-fopenmp-simd",), (), False), CompilerOptions((), (), False)]
    return [
        options._replace(flags=(*options.flags, *tuning))
        for options in openmp
        for tuning in dict.fromkeys((_native_flags(), ()))
    ]


def _native_flags() -> tuple[str, ...]:
    if _is_x86():
        wide = ("-mprefer-vector-width=512",) if "avx512" in processor_features() else ()
        return "-march=native", *wide
    return ("-mcpu=native",) if platform.machine().lower() in ("arm64", "aarch64") else ()


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _openmp_libraries(pattern: str) -> tuple[str, ...]:
    """PyTorch's own OpenMP runtime: two runtimes in a process would compete for cores."""
    root = Path(torch.__file__).parent
    for folder in (root / "lib", root.parent / "torch.libs"):
        for path in sorted(folder.glob(pattern)):
            return (str(path),)
    return ()


@cache
def best_options(compiler: tuple[str, ...]) -> CompilerOptions:
    """The first of `option_candidates` that the compiler accepts. Raises NativeUnavailable without
    one."""
    first_error = None
    with tempfile.TemporaryDirectory() as folder:
        for options in option_candidates():
            try:
                compile_library(compiler, options, FLAGS, _PROBE, Path(folder) / "probe.so")
            except NativeUnavailable as error:
                first_error = first_error or error
                continue
            if not options.threads:
                _log.warning(
                    "the CPU kernels use one thread: %s has no OpenMP; install it (libomp, for "
                    "clang) or name a compiler that has it in $CC", compiler[0],
                )  # fmt: skip
            return options
    assert first_error is not None, "option_candidates is never empty"
    raise first_error


def compile_library(
    compiler: Sequence[str], options: CompilerOptions, flags: Sequence[str], source: str, path: Path
) -> None:
    """Compiles the C ``source`` to a shared library at ``path``, in an existing folder.

    Raises NativeUnavailable if the compiler fails or the folder is not writable."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            library, c_file = Path(folder) / "kernel.so", Path(folder) / "kernel.c"
            c_file.write_text(source, encoding="utf-8")
            command = [
                *compiler,
                "-std=gnu11",
                *options.flags,
                *flags,
                "-shared",
                "-fPIC",
                str(c_file),
            ]
            result = _run([*command, "-o", str(library), "-lm", *options.libraries])
            if result.returncode != 0:
                raise NativeUnavailable(
                    f"{compiler[0]} can't compile the CPU kernels: "
                    f"{result.stderr.strip()[:500]}\nfix the compiler, name another in $CC, or "
                    "choose cpu_kernels='torch'",
                    "cpu_kernels",
                )
            # atomic: another process may write the same library
            library.replace(path)
    except OSError as error:
        raise NativeUnavailable(
            f"the CPU kernels can't be compiled in {path.parent}: {error}; set XDG_CACHE_HOME to a "
            "writable folder, or choose cpu_kernels='torch'",
            "cpu_kernels",
        ) from error


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        # the compiler's messages may have any encoding
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(
            f"{command[0]} can't be run: {error}; name another compiler in $CC, or choose "
            "cpu_kernels='torch'",
            "cpu_kernels",
        ) from error


@cache
def compiler_version(compiler: tuple[str, ...]) -> str:
    """Output of ``--version``. Raises NativeUnavailable if the compiler does not run."""
    return _run([*compiler, "--version"]).stdout


@cache
def processor_features() -> str:
    """Instruction sets of the processor, for the cache key: machines may share a cache folder."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
