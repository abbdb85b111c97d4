"""Sampling advice in a checkpoint's generation_config.json.

The library ignores the advice. A server uses it for options that a request leaves out.
"""

from pathlib import Path
from typing import Any

from looseleaf.errors import CorruptCheckpoint, InvalidOption
from looseleaf.models.checkpoint.files import read_json
from looseleaf.sampling_params import SamplingParams

_NAME = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# read elsewhere, about the file itself, or implied by the temperature
_OTHER = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("transformers_version", "use_cache", "cache_implementation", "do_sample"),
}
# values of fields without effect
_NEUTRAL: tuple[Any, ...] = (None, 0, 1, "", [], {})


def read_advice(folder: Path) -> dict[str, Any]:
    """Fields of `SamplingParams` in the file that differ from the defaults.

    Raises CorruptCheckpoint for values that `SamplingParams` rejects.
    """
    raw = read_json(folder / _NAME)
    advice = {name: raw[name] for name in _SAMPLING if raw.get(name) is not None}
    try:
        params, default = SamplingParams(**advice), SamplingParams()
    except InvalidOption as error:
        raise CorruptCheckpoint(f"{folder / _NAME}: {error}; correct it") from error
    return {
        name: getattr(params, name)
        for name in advice
        if getattr(params, name) != getattr(default, name)
    }


def names_of_advice(folder: Path) -> list[str]:
    """Fields of the file with an effect in Transformers and none in the engine."""
    return sorted(
        name
        for name, value in read_json(folder / _NAME).items()
        if name not in _OTHER and not name.startswith(("_", "output_")) and value not in _NEUTRAL
    )
