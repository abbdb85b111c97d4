"""From a checkpoint's ``config.json`` to a ``ModelConfig``.

A setting that changes logits and is not implemented raises an error that names it.
"""

import dataclasses
from pathlib import Path

from looseleaf.config import ModelConfig
from looseleaf.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    InvalidOption,
    ModelError,
    UnsupportedModel,
)
from looseleaf.models.checkpoint.checkpoint import list_tensors, refuse_other_formats
from looseleaf.models.checkpoint.fields import Json, shown, switch
from looseleaf.models.checkpoint.files import read_json
from looseleaf.models.config.families import FAMILIES
from looseleaf.models.config.gemma4 import GEMMA4
from looseleaf.models.config.latent import LATENTS
from looseleaf.models.config.mixtures import MIXTURES
from looseleaf.models.config.quantization import read_quantization
from looseleaf.models.config.rope_reader import require_frequencies

_STORED = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_config(folder: Path) -> ModelConfig:
    """The configuration of the checkpoint in ``folder``. Raises ModelError."""
    refuse_other_formats(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointNotFound(
            f"{folder} holds no config.json: give the folder of a Hugging Face checkpoint, or a "
            "GGUF file"
        )
    config = parse_config(read_json(path), str(path))
    if config.torch_dtype != "auto":
        return config
    return dataclasses.replace(config, torch_dtype=_dtype_of_tensors(folder))


def parse_config(raw: Json, source: str = "config.json") -> ModelConfig:
    """The configuration of the JSON object ``raw``; errors name ``source``. Raises ModelError.

    ``torch_dtype`` is ``auto`` if the stored tensors decide it.
    """
    family = raw.get("model_type")
    families = {**FAMILIES, **MIXTURES, **LATENTS, **GEMMA4}
    build = families.get(str(family))
    if build is None:
        known = ", ".join(sorted(families))
        raise UnsupportedModel(
            f"{source}: model family {shown(family)} is not supported; supported: {known}"
        )
    try:
        _refuse_variants(raw)
        config = dataclasses.replace(build(raw), quantization=read_quantization(raw))
        for rope in config.ropes:
            require_frequencies(rope)
        return config
    except KeyError as error:
        raise CorruptCheckpoint(f"{source} lacks {error.args[0]!r}; download it again") from error
    except ModelError as error:
        raise type(error)(f"{source}: {error}") from error
    except InvalidOption as error:
        raise CorruptCheckpoint(f"{source}: {error}; correct it") from error


def _refuse_variants(raw: Json) -> None:
    """Raise UnsupportedModel for bidirectional attention."""
    if not switch(raw, "is_causal", True):
        raise UnsupportedModel(
            "is_causal is false: this model reads in both directions, to embed texts, and "
            "Looseleaf only continues them; use a causal language model"
        )


def _dtype_of_tensors(folder: Path) -> str:
    """The dtype of the first floating-point tensor, as in Transformers for ``auto``."""
    stored = (_STORED.get(entry.dtype) for entry in list_tensors(folder).values())
    return next((dtype for dtype in stored if dtype), "float32")
