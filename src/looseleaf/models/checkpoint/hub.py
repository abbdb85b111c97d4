"""From a checkpoint's name to its folder: a local folder, a GGUF file, or a hub id.

Only safetensors, JSON and template files are downloaded, never pickles.
"""

import os
import re
from pathlib import Path
from typing import Protocol, runtime_checkable

from looseleaf.assets import REFERENCE_MODELS
from looseleaf.errors import CheckpointNotFound
from looseleaf.models.checkpoint.gguf.folder import SUFFIX, folder_of_gguf, is_gguf

WANTED = ("*.safetensors", "*.json", "*.jinja")
# copies of the weights in other layouts
UNWANTED = ("consolidated*.safetensors", "*/*.safetensors")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@runtime_checkable
class Downloader(Protocol):
    """Downloads the files of a hub id that match patterns; returns their folder."""

    def __call__(
        self, repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str: ...


def find_checkpoint(name: str | Path, download: Downloader | None = None) -> Path:
    """The folder of checkpoint ``name``, a path or a hub id; an existing folder wins.

    ``download`` replaces the hub's client. A GGUF file gets a folder in the cache; a folder with
    one GGUF file and no configuration stands for that file. Raises CheckpointNotFound, and the
    errors of `folder_of_gguf`.
    """
    # pathlib raises for unknown home folders and for malformed names
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        if os.access(folder, os.R_OK | os.X_OK):
            return _gguf_in(folder) or folder
        raise CheckpointNotFound(f"{name} can't be read by this user: see whose it is")
    if is_gguf(folder):
        return folder_of_gguf(folder)
    if os.path.exists(folder):
        raise CheckpointNotFound(
            f"{name} is a file and not GGUF; give the folder that holds config.json"
        )
    if str(name).endswith(SUFFIX):
        raise CheckpointNotFound(f"no file {name}: check the path")
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
        ) from None


def _gguf_in(folder: Path) -> Path | None:
    """The folder of the only GGUF model in a folder without config.json, else None."""
    if (folder / "config.json").exists():
        return None
    paths = sorted(folder.glob("*" + SUFFIX))
    # parts of a split file are one model
    models = {re.sub(r"-\d{5}-of-\d{5}$", "", path.stem) for path in paths}
    if len(models) > 1:
        raise CheckpointNotFound(
            f"{folder} holds {len(models)} GGUF models: give one of the files, such as {paths[0]}"
        )
    return folder_of_gguf(paths[0]) if paths else None


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
