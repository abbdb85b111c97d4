"""A digest of a model's configuration and weights, which document keys include.

It depends on contents, not on names, folders or times of files. Samples of each tensor suffice
within a process. Documents that outlive the process need every byte, since a few rows of a
checkpoint may change. The tokenizer is not included: a document's key names its tokens.
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

# fields without effect on logits
_CONFIG_NOISE = ("transformers_version", "_name_or_path", "use_cache", "architectures")
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 64


def model_fingerprint(folder: Path, whole: bool = False) -> bytes:
    """The digest of the checkpoint in ``folder``, 16 bytes.

    ``whole`` reads every byte and gives the same digest on every machine. Otherwise samples from
    each tensor distinguish training runs in moments. Raises CorruptCheckpoint, also for a file that
    changes during the call.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = read_json(folder / "config.json")
    relevant = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    by_path: dict[Path, list[TensorEntry]] = defaultdict(list)
    for entry in list_tensors(folder).values():
        by_path[entry.path].append(entry)
    contents = {path: _sample(path, entries) for path, entries in by_path.items()}
    if whole:
        contents = digest_files(contents)
    # several files may hold a tensor and the index selects one, so names belong to their file
    named = [
        (contents[path], sorted(entry.name for entry in entries))
        for path, entries in by_path.items()
    ]
    for content, names in sorted(named):
        digest.update(content + json.dumps(names).encode())
    return digest.digest()


def _sample(path: Path, entries: list[TensorEntry]) -> bytes:
    """A digest of a file's size, its tensor table and samples of each tensor."""
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
