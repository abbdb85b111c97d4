"""Compiles C kernels for one shape with the machine's C compiler, and loads them.

The user's cache folder keeps libraries under a hash of source, flags, compiler and processor. Only
the first run of a shape compiles, in about a second. Compilation at run time makes shapes
compile-time constants and keeps the package pure Python."""

import atexit
import ctypes
import hashlib
import logging
import os
import shutil
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

from looseleaf.errors import NativeUnavailable
from looseleaf.ops.native.c_compiler import (
    FLAGS,
    best_options,
    compile_library,
    compiler_version,
    find_compiler,
    option_candidates,
    processor_features,
)

_log = logging.getLogger(__name__)
# environment variables that decide whether a source compiles
_ENVIRONMENT = ("CC", "PATH", "HOME", "XDG_CACHE_HOME")


@cache
def load_library(
    source: str, defines: tuple[tuple[str, int], ...], flags: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """The C ``source`` compiled with ``defines`` and ``flags``, from the cache if present.

    Raises NativeUnavailable without a compiler, or if compilation fails. A failure is cached until
    one of the environment variables above changes."""
    loaded = _try_to_load(source, defines, flags, tuple(map(os.environ.get, _ENVIRONMENT)))
    if isinstance(loaded, str):
        raise NativeUnavailable(loaded, "cpu_kernels")
    return loaded


@cache
def _try_to_load(
    source: str,
    defines: tuple[tuple[str, int], ...],
    flags: tuple[str, ...],
    environment: tuple[str | None, ...],
) -> ctypes.CDLL | str:
    """The library, or the error message for this environment."""
    try:
        return _load(_find_or_compile(source, defines, flags))
    except NativeUnavailable as error:
        return str(error)
    except OSError as error:
        return (
            f"the CPU kernels can't be compiled: {error}; set XDG_CACHE_HOME or TMPDIR to a "
            "writable folder, or choose cpu_kernels='torch'"
        )


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(
            f"the compiled CPU kernels can't be loaded: {error}; delete {path} if it is damaged, "
            "or set XDG_CACHE_HOME to a folder without noexec"
        ) from error


def read_source(package: str, *names: str) -> str:
    """``float16.h`` and the named C files of a package, concatenated."""
    files = [resources.files("looseleaf.ops").joinpath("float16.h")]
    files += [resources.files(package).joinpath(name) for name in names]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def _find_or_compile(
    source: str, defines: tuple[tuple[str, int], ...], flags: tuple[str, ...]
) -> Path:
    compiler = find_compiler()
    options = [*FLAGS, *flags, *(f"-D{name}={n}" for name, n in defines)]
    inputs = [*compiler, *options, *map(str, option_candidates())]
    identity = [source, *inputs, compiler_version(compiler), processor_features()]
    name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    path = cache_folder() / f"{name}.so"
    # Path.exists raises below another user's private folder
    if os.path.exists(path):
        return path
    if not can_write_to(path.parent):
        path = process_folder() / path.name
    if not path.exists():
        compile_library(compiler, best_options(compiler), options, source, path)
    return path


def cache_folder() -> Path:
    """Folder of compiled kernels: ``$XDG_CACHE_HOME/looseleaf/native``, or below ``~/.cache``.

    Without either, a temporary folder of this process."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:
        return process_folder() / "native"
    return base / "looseleaf" / "native"


def can_write_to(folder: Path) -> bool:
    """Whether files can be made in ``folder``, which is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@cache
def process_folder() -> Path:
    """A temporary folder that ends with this process, for caches without a writable folder."""
    # a predictable name would let other users plant a library there
    folder = Path(tempfile.mkdtemp(prefix="looseleaf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _log.warning(
        "no writable cache folder: every process compiles the CPU kernels again, and makes its "
        "other caches again; set XDG_CACHE_HOME to a writable folder"
    )
    return folder
