"""From a checkpoint's name to its folder: a local folder, or a hub id in the hub's cache.

Only safetensors, JSON and template files are downloaded, never pickles.
"""

import os
import re
from pathlib import Path
from typing import Protocol, runtime_checkable

from looseleaf.assets import REFERENCE_MODELS
from looseleaf.errors import CheckpointNotFound, UnsupportedModel
from looseleaf.models.checkpoint.checkpoint import GGUF_ADVICE

WANTED = ("*.safetensors", "*.json", "*.jinja")
# copies of the weights in other layouts
UNWANTED = ("consolidated*.safetensors", "*/*.safetensors")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@runtime_checkable
class Downloader(Protocol):
    """Downloads the files of a hub id that match patterns; returns their folder."""

    def __call__(
        self, repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str: ...


def find_checkpoint(name: str | Path, download: Downloader | None = None) -> Path:
    """The folder of checkpoint ``name``, a path or a hub id; an existing folder wins.

    ``download`` replaces the hub's client. Raises CheckpointNotFound, and UnsupportedModel for a
    GGUF file.
    """
    # pathlib raises for unknown home folders and for malformed names
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        if os.access(folder, os.R_OK | os.X_OK):
            return folder
        raise CheckpointNotFound(f"{name} can't be read by this user: see whose it is")
    if folder.suffix == ".gguf" and os.path.exists(folder):
        raise UnsupportedModel(f"{name} is GGUF: {GGUF_ADVICE}")
    if os.path.exists(folder):
        raise CheckpointNotFound(f"{name} is a file; give the folder that holds config.json")
    if not _HUB_ID.fullmatch(str(name)):
        raise CheckpointNotFound(
            f"no folder {name}; give a checkpoint's folder, a hub id 'owner/name', or the name of "
            f"a model that ships with the package: {' or '.join(REFERENCE_MODELS)}"
        )
    download = download or _hub_download()
    try:
        return Path(
            download(str(name), allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED))
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointNotFound(
            f"no folder {name}, and the hub did not give it ({type(error).__name__}: {reason}). "
            "Check the spelling, and `hf auth login` for gated models; offline, download it "
            "elsewhere and give the folder"
        ) from error


def _hub_download() -> Downloader:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointNotFound(
            "hub ids need huggingface_hub: pip install huggingface_hub, or give a local folder"
        ) from error

    def download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        return snapshot_download(
            repo_id, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )

    return download
