"""What a checkpoint's generation_config.json says about sampling, which is advice.

`SamplingParams` are what their caller wrote; a server takes the advice where a request is silent.
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
# what most fields have when they ask for nothing
_NOTHING: tuple[Any, ...] = (None, 0, 1, "", [], {})


def read_advice(folder: Path) -> dict[str, Any]:
    """Fields of `SamplingParams` that the file advises, where they change anything.

    Raises CorruptCheckpoint for values that `SamplingParams` refuses.
    """
    given = read_json(folder / _NAME)
    advice = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    try:
        asked, default = SamplingParams(**advice), SamplingParams()
    except InvalidOption as error:
        raise CorruptCheckpoint(f"{folder / _NAME}: {error}; correct it") from error
    return {
        name: getattr(asked, name)
        for name in advice
        if getattr(asked, name) != getattr(default, name)
    }


def names_of_advice(folder: Path) -> list[str]:
    """All fields of the file that Transformers would follow and that the engine does not read."""
    return sorted(
        name
        for name, value in read_json(folder / _NAME).items()
        if name not in _OTHER and not name.startswith(("_", "output_")) and value not in _NOTHING
    )
