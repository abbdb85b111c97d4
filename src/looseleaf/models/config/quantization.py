"""The field ``quantization_config``: methods whose matrices are codes with scales.

The tensors of a module say the rest: bits, groups and zeros."""

from collections.abc import Mapping
from typing import Any, NoReturn, get_args

from looseleaf.config import Quantization
from looseleaf.errors import UnsupportedModel
from looseleaf.models.checkpoint.fields import Json, shown

_FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized", "dense")
_METHODS: tuple[str, ...] = get_args(Quantization.__annotations__["method"])


def read_quantization(raw: Json) -> Quantization | None:
    """The quantization of a model's ``config.json``; None if all tensors are plain.

    Raises UnsupportedModel for a method or a layout that is not implemented."""
    settings = raw.get("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method", "unnamed") if isinstance(settings, Mapping) else ""
    if method == "fp8":
        return Quantization("fp8")
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method == "compressed-tensors":
        _check_compressed(settings)
        return Quantization("compressed-tensors")
    if method == "awq":
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            _refuse("version", version, "gemm")
        return Quantization("awq", version)
    if method == "gptq":
        version = str(settings.get("checkpoint_format", "gptq")).lower()
        if version not in ("gptq", "gptq_v2"):
            _refuse("checkpoint_format", version, "gptq and gptq_v2")
        return Quantization("gptq", version)
    _refuse("quant_method", method, ", ".join(_METHODS))


def _check_compressed(settings: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for a layout that is not implemented."""
    layout = settings.get("format", "dense")
    if layout not in _FORMATS:
        _refuse("format", layout, ", ".join(_FORMATS))
    sparsity = settings.get("sparsity_config") or {}
    kind = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else "unnamed"
    if kind != "dense":
        _refuse("sparsity_config.format", kind, "dense")


def _refuse(field: str, value: object, supported: str) -> NoReturn:
    raise UnsupportedModel(
        f"quantization_config.{field} is {shown(value)}; supported: {supported}. Use such a "
        "checkpoint, or one in float32, float16 or bfloat16"
    )
