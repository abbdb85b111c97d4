"""Compiles C kernels for one shape with the machine's C compiler, once, and loads them.

What was compiled is kept in the user's cache folder under a hash of source, flags, compiler and
processor, so that only the first run of a shape waits (about a second). Nothing is compiled when
the package is installed: it stays pure Python, and shapes are constants to the compiler.
"""

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
    compile_library,
    compiler_version,
    find_compiler,
    processor,
    way_of,
    ways,
)

_log = logging.getLogger(__name__)
# what decides, besides the source, whether it compiles
_ENVIRONMENT = ("CC", "PATH", "HOME", "XDG_CACHE_HOME")


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
        raise NativeUnavailable(loaded, "cpu_kernels")
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
    except OSError as error:
        return (
            f"the CPU kernels can't be compiled: {error}; set XDG_CACHE_HOME or TMPDIR to a folder "
            "that can be written to, or choose cpu_kernels='torch'"
        )


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(
            f"the compiled CPU kernels can't be loaded: {error}; delete {path} if it is damaged, "
            "or set XDG_CACHE_HOME to a folder that programs may be run from"
        ) from error


def read_source(package: str, *names: str) -> str:
    """C files of a package, one behind the other, behind what widens floats of 16 bits."""
    files = [resources.files("looseleaf.ops").joinpath("float16.h")]
    files += [resources.files(package).joinpath(name) for name in names]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def _find_or_compile(
    source: str, defines: tuple[tuple[str, int], ...], flags: tuple[str, ...]
) -> Path:
    compiler = find_compiler()
    wanted = [*FLAGS, *flags, *(f"-D{name}={n}" for name, n in defines)]
    asked = [*compiler, *wanted, *map(str, ways())]
    identity = [source, *asked, compiler_version(compiler), processor()]
    name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    path = cache_folder() / f"{name}.so"
    # not Path.exists, which raises where a folder of another user's is in between
    if os.path.exists(path):
        return path
    if not _can_write_to(path.parent):
        path = _process_folder() / path.name
    if not path.exists():
        compile_library(compiler, way_of(compiler), wanted, source, path)
    return path


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/looseleaf/native``. Who has neither that
    nor a home has a folder that ends with the process."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:
        return _process_folder()
    return base / "looseleaf" / "native"


def _can_write_to(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@cache
def _process_folder() -> Path:
    # a name that others could know is one at which they could lay a library of theirs
    folder = Path(tempfile.mkdtemp(prefix="looseleaf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _log.warning(
        "no cache folder that can be written to: the CPU kernels are compiled anew in every "
        "process; set XDG_CACHE_HOME to one that can"
    )
    return folder
