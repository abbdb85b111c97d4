"""What a model computes, as a digest: keys of its documents are kept under it.

Contents decide, not names, places or times of files. Within a process samples of each tensor do.
Where documents outlive the process every byte counts, since a few rows of a checkpoint may change
meanwhile. The tokenizer is no part of it: a document's key names its tokens.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from looseleaf.models.checkpoint.checkpoint import list_tensors
from looseleaf.models.checkpoint.digests import digest_files
from looseleaf.models.checkpoint.files import read_json
from looseleaf.models.checkpoint.header import TensorEntry

# what says how a checkpoint was written, not what it computes
_CONFIG_NOISE = ("transformers_version", "_name_or_path", "use_cache", "architectures")
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 64


def model_fingerprint(folder: Path, whole: bool = False) -> bytes:
    """A digest of what the model computes: its configuration and its tensors.

    ``whole`` counts every byte of the files, and is the same on every machine that has them.
    Without it samples are spread over each tensor: weights of the same shape from different
    training runs differ, and a checkpoint of many gigabytes is told apart in moments.
    Raises CorruptCheckpoint, also if a file changes meanwhile.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = read_json(folder / "config.json")
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    by_path: dict[Path, list[TensorEntry]] = defaultdict(list)
    for entry in list_tensors(folder).values():
        by_path[entry.path].append(entry)
    contents = {path: _sample(path, entries) for path, entries in by_path.items()}
    if whole:
        contents = digest_files(contents)
    # of a tensor in several files the index says which counts, so names belong to their file
    named = [
        (contents[path], sorted(entry.name for entry in entries))
        for path, entries in by_path.items()
    ]
    for content, names in sorted(named):
        digest.update(content + json.dumps(names).encode())
    return digest.digest()


def _sample(path: Path, entries: list[TensorEntry]) -> bytes:
    """A digest of a file's size, of its table of tensors and of parts of each."""
    digest = hashlib.blake2b(str(path.stat().st_size).encode(), digest_size=16)
    with path.open("rb") as file:
        for entry in sorted(entries, key=lambda entry: (entry.start, entry.name)):
            digest.update(repr((entry.name, entry.dtype, entry.shape)).encode())
            for piece in _pieces(file.fileno(), entry):
                digest.update(piece)
    return digest.digest()


def _pieces(descriptor: int, entry: TensorEntry) -> Iterator[bytes]:
    length = entry.end - entry.start
    stride = max(length // _NUM_SAMPLES, _SAMPLE_BYTES)
    for offset in range(0, length, stride):
        yield os.pread(descriptor, min(_SAMPLE_BYTES, length - offset), entry.start + offset)
