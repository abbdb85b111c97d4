"""Compiles C kernels for one shape with the machine's C compiler, once, and loads them.

What was compiled is kept in the user's cache folder under a hash of source, flags, compiler and
processor, so that only the first run of a shape waits (about a second). Nothing is compiled when
the package is installed: it stays pure Python, and shapes are constants to the compiler.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from looseleaf.errors import NativeUnavailable

_SECONDS = 120
# what decides, besides the source, whether it compiles
_ENVIRONMENT = ("CC", "PATH", "XDG_CACHE_HOME")


@cache
def load_library(
    source: str, defines: tuple[tuple[str, int], ...], flags: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """The C ``source`` compiled with ``defines`` and more ``flags``, out of the cache if it is
    there.

    Raises NativeUnavailable if there is no C compiler, or it can't compile them; that is not tried
    again for each of the calls that ask for them, until somebody names another compiler.
    """
    loaded = _try_to_load(source, defines, flags, tuple(map(os.environ.get, _ENVIRONMENT)))
    if isinstance(loaded, str):
        raise NativeUnavailable(loaded)
    return loaded


@cache
def _try_to_load(
    source: str,
    defines: tuple[tuple[str, int], ...],
    flags: tuple[str, ...],
    environment: tuple[str | None, ...],
) -> ctypes.CDLL | str:
    """The library, or why there is none in this environment."""
    try:
        return _load(_find_or_compile(source, defines, flags))
    except NativeUnavailable as error:
        return str(error)


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(
            f"the compiled CPU kernels can't be loaded: {error}; delete {path} if it is damaged, "
            "or set XDG_CACHE_HOME to a folder that programs may be run from"
        ) from error


def _find_or_compile(
    source: str, defines: tuple[tuple[str, int], ...], flags: tuple[str, ...]
) -> Path:
    compiler = find_compiler()
    command = [compiler, "-std=gnu11", *_flags(), *flags, *(f"-D{name}={n}" for name, n in defines)]
    libraries = ["-lm", *_openmp_libraries()]
    identity = [source, *command, *libraries, _compiler_version(compiler), _processor()]
    name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    path = cache_folder() / f"{name}.so"
    if not path.exists():
        _compile(command, libraries, source, path)
    return path


def vector_lanes() -> int:
    """Floats in the processor's widest vector."""
    processor = _processor()
    return 16 if "avx512f" in processor else 8 if "avx2" in processor else 4


def find_compiler() -> str:
    """The C compiler: ``$CC``, or cc, gcc, clang. Raises NativeUnavailable without one."""
    wanted = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise NativeUnavailable(
        f"no C compiler ({', '.join(wanted)}): install gcc or clang, or choose cpu_kernels='torch'"
    )


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/looseleaf/native``."""
    home = os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path.home() / ".cache"
    return base / "looseleaf" / "native"


def _compile(command: Sequence[str], libraries: Sequence[str], source: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "kernel.so"
            c_file = Path(folder) / "kernel.c"
            c_file.write_text(source)
            done = subprocess.run(
                [*command, "-shared", "-fPIC", str(c_file), "-o", str(made), *libraries],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
            if done.returncode != 0:
                raise NativeUnavailable(
                    f"{command[0]} can't compile the CPU kernels: "
                    f"{done.stderr.strip()[:500]}\nfix the compiler, name another in $CC, or "
                    "choose cpu_kernels='torch'"
                )
            # another process may have made the same: either is as good
            made.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(
            f"the CPU kernels can't be compiled in {path.parent}: {error}; set XDG_CACHE_HOME to a "
            "folder that can be written, or choose cpu_kernels='torch'"
        ) from error


def _flags() -> list[str]:
    # infinities matter (an empty state has lse -inf), so no -ffast-math
    flags = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp"]
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        flags += ["-march=native"]
        if "avx512" in _processor():
            flags += ["-mprefer-vector-width=512"]
    elif machine in ("arm64", "aarch64"):
        flags += ["-mcpu=native"]
    return flags


def _openmp_libraries() -> list[str]:
    """PyTorch's own OpenMP runtime, so that one pool of threads serves both; two would fight."""
    root = Path(torch.__file__).parent
    for folder in (root / "lib", root.parent / "torch.libs"):
        for path in sorted(folder.glob("libgomp*.so*")):
            return [str(path)]
    return []


@cache
def _compiler_version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS)
    return done.stdout


@cache
def _processor() -> str:
    """What the processor can do: a cache folder may be shared by machines."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
