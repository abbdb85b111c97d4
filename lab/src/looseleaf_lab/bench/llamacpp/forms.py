"""Forms of a GGUF file in other bits, made by llama.cpp's own quantizer."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from looseleaf.errors import InvalidOption
from looseleaf_lab.errors import BenchmarkRefused

FORMS = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
"""File types of llama.cpp by name."""


def bindings() -> Any:
    """The module ``llama_cpp``, silent. Raises InvalidOption without the package."""
    if find_spec("llama_cpp") is None:
        raise InvalidOption(
            "bench llamacpp needs llama-cpp-python: pip install llama-cpp-python compiles it"
        )
    import llama_cpp

    llama_cpp.llama_log_set(_silent(llama_cpp), None)
    return llama_cpp


def convert(model: Path, form: str, folder: Path) -> Path:
    """``model`` in ``form``, one of `FORMS`, as a file in ``folder``.

    Values of quantized weights are quantized again. Raises BenchmarkRefused if llama.cpp refuses
    the file, and InvalidOption without the package."""
    api = bindings()
    settings = api.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize = FORMS[form], True
    target = folder / f"{model.stem}-{form}.gguf"
    if api.llama_model_quantize(str(model).encode(), str(target).encode(), settings):
        raise BenchmarkRefused(f"llama.cpp can't write {model.name} in {form}")
    return target


@cache
def _silent(api: Any) -> Any:
    """A callback for messages that drops them; it must live as long as the library."""
    return api.llama_log_callback(lambda level, text, data: None)
