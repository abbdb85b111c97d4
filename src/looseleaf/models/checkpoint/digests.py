"""Digests of whole files, and a cache of the digests.

A digest is the SHA-256 over the SHA-256 of each chunk, so threads share the work of one file. The
cache is ``digests.json`` beside the folder of compiled kernels. An entry is valid while path,
inode, size, times and samples of the contents stay the same. Small files are read at each start.
"""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models.checkpoint.file_state import FileState, changed_meanwhile
from looseleaf.ops.native.native_build import cache_folder

_log = logging.getLogger(__name__)

_MAX_THREADS = 16
# part of the digest's definition: another size gives other digests
_CHUNK_BYTES = 16 << 20
# fits the cache of a core
_READ_BYTES = 1 << 20
# hashed in a tenth of a second: a cache saves nothing
_SMALL_BYTES = 64 << 20
# a younger file may change again within the resolution of its times
_SETTLED_NS = 10_000_000_000
_SECOND_NS = 1_000_000_000
_FIELDS = 6


@dataclass(frozen=True)
class _Entry:
    """A cached digest and the state for which it is valid; both digests in hex."""

    state: FileState
    sample: str
    digest: str


_Cache = Mapping[str, _Entry]


def digest_files(samples: Mapping[Path, bytes]) -> dict[Path, bytes]:
    """The digest of each file. ``samples`` has a digest of parts of each file's contents.

    Raises CorruptCheckpoint if a file can't be read or changes during the call.
    """
    cached = _read_cache()
    digests, fresh = {}, {}
    with ThreadPoolExecutor(_num_threads(), "looseleaf-digest") as pool:
        for path, sample in samples.items():
            # links to one file share its entry
            real = path.resolve()
            try:
                state = FileState.of(real.stat())
                entry = cached.get(str(real))
                if not _is_cacheable(state):
                    entry = None
                elif entry is None or (entry.state, entry.sample) != (state, sample.hex()):
                    entry = _Entry(state, sample.hex(), _read(real, state, pool).hex())
                    fresh[str(real)] = entry
                digests[path] = bytes.fromhex(entry.digest) if entry else _read(real, state, pool)
            except OSError as error:
                raise CorruptCheckpoint(
                    f"{path} can't be read ({error.strerror}); download it again"
                ) from error
    if fresh:
        _store(fresh)
    return digests


def _is_cacheable(state: FileState) -> bool:
    """Whether the times of a large file identify its contents.

    The file system may round or clamp times of whole seconds. Other contents may get the same time
    if the time is recent or in the future.
    """
    age = time.time_ns() - max(state.changed_ns, state.modified_ns)
    exact = state.changed_ns % _SECOND_NS != 0
    return state.size > _SMALL_BYTES and exact and age > _SETTLED_NS


def _read(path: Path, before: FileState, pool: ThreadPoolExecutor) -> bytes:
    """The digest of a file's bytes."""
    if before.size > _SMALL_BYTES:
        _log.info("reading %s: documents are kept by the contents of the weights", path)
    with path.open("rb") as file:
        descriptor = file.fileno()

        def digest(start: int) -> bytes:
            return _digest_chunk(descriptor, start, min(_CHUNK_BYTES, before.size - start))

        whole = hashlib.sha256(before.size.to_bytes(8, "little"))
        for chunk in pool.map(digest, range(0, before.size, _CHUNK_BYTES)):
            whole.update(chunk)
        opened = FileState.of(os.fstat(descriptor))
    # compare the opened file and the file now at the path
    if before != opened or before != FileState.of(path.stat()):
        raise changed_meanwhile(path)
    return whole.digest()


def _digest_chunk(descriptor: int, start: int, length: int) -> bytes:
    # a memory map of a truncated file would crash the process
    digest = hashlib.sha256()
    for piece in _pieces(descriptor, start, start + length):
        digest.update(piece)
    return digest.digest()


def _pieces(descriptor: int, start: int, end: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_READ_BYTES, end - start)))
    while start < end:
        count = os.preadv(descriptor, [buffer[: end - start]], start)
        if not count:
            # the file was truncated; the comparison of states reports it
            return
        yield buffer[:count]
        start += count


def _num_threads() -> int:
    return min(_MAX_THREADS, os.cpu_count() or 1)


def _cache_path() -> Path:
    return cache_folder().parent / "digests.json"


def _read_cache() -> _Cache:
    """The entries by path; empty if the file can't be read."""
    try:
        raw = json.loads(_cache_path().read_text(encoding="utf-8"))
        return {
            path: _Entry(FileState(*item[:4]), str(item[4]), str(item[5]))
            for path, item in raw.items()
            if isinstance(item, list) and len(item) == _FIELDS and bytes.fromhex(item[5])
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _store(fresh: _Cache) -> None:
    """Add ``fresh`` to the cache, and drop files that no longer exist."""
    path = _cache_path()
    entries = {**_read_cache(), **fresh}
    stored = {
        name: [*entry.state, entry.sample, entry.digest]
        for name, entry in entries.items()
        if os.path.exists(name)
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8"
        ) as file:
            try:
                json.dump(stored, file, indent=1)
                file.close()
                # atomic: other processes read the old file or the new file
                os.replace(file.name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        _log.warning("digests of weights can't be kept in %s: %s", path.parent, error)
