"""What a model computes, as a digest: keys of its documents are kept under it.

Within a process samples of each tensor do. Where documents outlive the process every byte counts,
since a checkpoint may be changed in a few rows meanwhile; what was digested is remembered, so that
the next start does not read it again.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from looseleaf.models.checkpoint import list_tensors
from looseleaf.models.files import read_json
from looseleaf.models.header import TensorEntry
from looseleaf.ops.native_build import cache_folder

_log = logging.getLogger(__name__)

# what says how a checkpoint was written, not what it computes
_CONFIG_NOISE = ("transformers_version", "_name_or_path", "use_cache", "architectures")
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 64
_MOST_THREADS = 8
# a file that is younger may be written once more without a change of its time
_SETTLED_NS = 2_000_000_000
# how the hub's cache names large files
_SHA256 = re.compile(r"[0-9a-f]{64}")

_Known = Mapping[str, list[Any]]


def model_fingerprint(folder: Path, whole: bool = False) -> bytes:
    """A digest of what the model computes: its configuration and its tensors.

    ``whole`` counts every byte of the files, and is the same on every machine that has them.
    Without it samples are spread over each tensor: weights of the same shape from different
    training runs differ, and a checkpoint of many gigabytes is told apart in moments.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = read_json(folder / "config.json")
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    entries = sorted(
        list_tensors(folder).values(), key=lambda entry: (entry.path.name, entry.start)
    )
    paths = sorted({entry.path for entry in entries})
    if whole:
        for path, found in zip(paths, _digests(paths), strict=True):
            digest.update(f"{path.name}:{found}".encode())
        return digest.digest()
    for path in paths:
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            for entry in entries:
                if entry.path == path:
                    digest.update(repr((entry.name, entry.dtype, entry.shape)).encode())
                    for sample in _samples(file.fileno(), entry):
                        digest.update(sample)
    return digest.digest()


def _samples(descriptor: int, entry: TensorEntry) -> Iterator[bytes]:
    length = entry.end - entry.start
    stride = max(length // _NUM_SAMPLES, _SAMPLE_BYTES)
    for offset in range(0, length, stride):
        yield os.pread(descriptor, min(_SAMPLE_BYTES, length - offset), entry.start + offset)


def _digests(paths: list[Path]) -> list[str]:
    """The SHA-256 of each file, in hex: by the name that the hub's cache gave it, as remembered, or
    of its bytes."""
    known, real = _read_known(), [path.resolve() for path in paths]
    # hashlib lets go of the interpreter, so files are read side by side
    with ThreadPoolExecutor(_MOST_THREADS, "looseleaf-digest") as pool:
        found = list(pool.map(lambda path: _digest(path, known), real))
    fresh = {
        str(path): [*state, digest]
        for path, (digest, state) in zip(real, found, strict=True)
        if state and known.get(str(path)) != [*state, digest]
    }
    if fresh:
        _remember(fresh)
    return [digest for digest, _ in found]


def _digest(path: Path, known: _Known) -> tuple[str, list[int]]:
    """A file's digest, and its state if that is worth remembering, else nothing."""
    if path.parent.name == "blobs" and _SHA256.fullmatch(path.name):
        return path.name, []
    before = _state(path)
    *state, digest = known.get(str(path), [None])
    if state == before:
        return str(digest), before
    _log.info("reading %s to know the model by it; the next start remembers", path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    settled = before == _state(path) and time.time_ns() - before[-1] > _SETTLED_NS
    return digest, before if settled else []


def _state(path: Path) -> list[int]:
    """What changes when a file is written or replaced."""
    status = path.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _store() -> Path:
    return cache_folder().parent / "digests.json"


def _read_known() -> _Known:
    """What is remembered by path; nothing if it can't be read."""
    try:
        known = json.loads(_store().read_text(encoding="utf-8"))
        return {path: list(item) for path, item in known.items() if len(item) == 4}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(fresh: _Known) -> None:
    """Adds ``fresh`` to what is remembered, and drops files that are there no more."""
    path = _store()
    known = {**_read_known(), **fresh}
    kept = {name: item for name, item in known.items() if Path(name).exists()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8"
        ) as file:
            json.dump(kept, file, indent=1)
        # other processes read it whole, before or after
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("digests of weights can't be kept in %s: %s", path.parent, error)
