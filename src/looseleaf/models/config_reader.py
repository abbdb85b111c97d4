"""From a checkpoint's ``config.json`` to a ``ModelConfig``: each family's words and defaults.

Both spellings of RoPE are read: ``rope_theta`` beside ``rope_scaling``, and ``rope_parameters``.
What Looseleaf does not implement is refused by name; nothing is skipped silently that would change
a logit.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from looseleaf.config import ModelConfig, RopeConfig
from looseleaf.errors import CheckpointNotFound, CorruptCheckpoint, LooseleafError, UnsupportedModel
from looseleaf.models.checkpoint import list_tensors, refuse_other_formats

Json = Mapping[str, Any]

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
}
# what config.json may say, and what a model is run in then; nothing here runs in float64
_DTYPES = {
    **{"float32": "float32", "float": "float32", "float64": "float32", "double": "float32"},
    **{"float16": "float16", "half": "float16", "bfloat16": "bfloat16"},
}
_STORED = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# a law's parameters go by these names in config.json and in RopeConfig
_ROPE_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("truncate", "original_max_position_embeddings"),
    ),
    "longrope": (
        *("factor", "attention_factor", "short_factor", "long_factor"),
        "original_max_position_embeddings",
    ),
}
_ROPE_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
# families of which Transformers turns a part of each head; in others it turns whole heads
_PARTIAL = ("phi", "phi3")
_DEFAULT_MAX_POSITIONS = {"mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768, "phi3": 4_096}


def read_config(folder: Path) -> ModelConfig:
    """The configuration of the checkpoint in ``folder``."""
    refuse_other_formats(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointNotFound(
            f"{folder} holds no config.json; give the folder of a Hugging Face checkpoint"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CorruptCheckpoint(
            f"{path} can't be read as JSON ({error}); download it again"
        ) from error
    if not isinstance(raw, dict):
        raise CorruptCheckpoint(f"{path} is not a JSON object; download it again")
    config = parse_config(raw, str(path))
    if config.torch_dtype != "auto":
        return config
    return dataclasses.replace(config, torch_dtype=_dtype_of_tensors(folder))


def parse_config(raw: Json, source: str = "config.json") -> ModelConfig:
    """The configuration that the JSON object ``raw`` describes; ``source`` names it in errors.

    ``torch_dtype`` is ``auto`` where it is left to the tensors.
    """
    family = raw.get("model_type")
    build = _FAMILIES.get(str(family))
    if build is None:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModel(
            f"{source}: model family {family!r} is not supported; supported: {known}"
        )
    try:
        _refuse_others(raw)
        return build(raw)
    except KeyError as error:
        raise CorruptCheckpoint(f"{source} lacks {error.args[0]!r}; download it again") from error
    except LooseleafError as error:
        raise type(error)(f"{source}: {error}") from error
    except (TypeError, ValueError) as error:
        raise CorruptCheckpoint(
            f"{source} holds a value of the wrong kind ({error}); download it again"
        ) from error


def _refuse_others(raw: Json) -> None:
    """Refuse what makes another model of the same tensors."""
    quantised = raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else ""
        raise UnsupportedModel(
            f"quantization_config asks for the method {method!r}; quantised checkpoints are not "
            "supported, use the one in float32, float16 or bfloat16 that it was made from"
        )
    if raw.get("is_causal") is False:
        raise UnsupportedModel(
            "is_causal is false: this model reads in both directions, to embed texts, and "
            "Looseleaf only continues them; use a causal language model"
        )


def _shape(raw: Json) -> dict[str, Any]:
    """What every family writes the same way."""
    num_qo_heads = int(raw["num_attention_heads"])
    head_dim = raw.get("head_dim")
    if head_dim is None:
        head_dim = int(raw["hidden_size"]) // num_qo_heads
    family = str(raw["model_type"])
    return {
        "family": family,
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "intermediate_size": int(raw["intermediate_size"]),
        "num_layers": int(raw["num_hidden_layers"]),
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or num_qo_heads),
        "head_dim": int(head_dim),
        "max_position_embeddings": _max_positions(raw),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "torch_dtype": _dtype(raw),
    }


def _dtype(raw: Json) -> str:
    given = str(raw.get("dtype") or raw.get("torch_dtype") or "auto").removeprefix("torch.")
    if given != "auto" and given not in _DTYPES:
        raise UnsupportedModel(
            f"dtype {given!r} is not one that models are run in: write float32, float16, bfloat16 "
            "or auto into config.json"
        )
    return _DTYPES.get(given, given)


def _dtype_of_tensors(folder: Path) -> str:
    """That of the first tensor of floats, as Transformers has it for ``auto``."""
    stored = (_STORED.get(entry.dtype) for entry in list_tensors(folder).values())
    return next((dtype for dtype in stored if dtype), "float32")


def _max_positions(raw: Json) -> int:
    default = _DEFAULT_MAX_POSITIONS.get(str(raw["model_type"]), 2048)
    return int(raw.get("max_position_embeddings") or default)


def _activation(raw: Json, default: str) -> str:
    name = str(raw.get("hidden_act") or default)
    if name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise UnsupportedModel(f"activation {name!r} is not implemented; Looseleaf knows {known}")
    return _ACTIVATIONS[name]


def _rope(raw: Json, head_dim: int, default_fraction: float = 1.0) -> RopeConfig:
    """The law that either spelling describes; where both are there they must mean the same."""
    spellings = [dict(raw[name]) for name in ("rope_parameters", "rope_scaling") if raw.get(name)]
    meant = [_rope_of(raw, one, head_dim, default_fraction) for one in spellings or [{}]]
    if meant[0] != meant[-1]:
        raise UnsupportedModel(
            "rope_parameters and rope_scaling are both there and differ: write the law and its "
            "rope_theta into rope_parameters, and delete rope_scaling"
        )
    return meant[0]


def _rope_of(raw: Json, scaling: Json, head_dim: int, default_fraction: float) -> RopeConfig:
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModel("RoPE parameters that differ between layers are not implemented")
    law = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if raw["model_type"] == "phi3" and law in ("su", "yarn"):
        # early Phi-3 checkpoints call LongRoPE so
        law = "longrope"
    if law != "default" and law not in _ROPE_FIELDS:
        known = ", ".join(["default", *_ROPE_FIELDS])
        raise UnsupportedModel(f"RoPE law {law!r} is not implemented; Looseleaf knows {known}")
    fraction = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if fraction is not None and float(fraction) != 1.0 and raw["model_type"] not in _PARTIAL:
        raise UnsupportedModel(
            f"partial_rotary_factor {fraction} is not implemented for {raw['model_type']}, of "
            "which Transformers turns whole heads; delete it if the model was trained so"
        )
    rotary_dim = int(head_dim * (default_fraction if fraction is None else float(fraction)))
    theta = scaling.get("rope_theta", raw.get("rope_theta"))
    return RopeConfig(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        theta=10_000.0 if theta is None else float(theta),
        law=law,  # type: ignore[arg-type]
        max_position_embeddings=_max_positions(raw),
        **_law_parameters(raw, law, scaling),
    )


def _law_parameters(raw: Json, law: str, scaling: Json) -> dict[str, Any]:
    given = {
        name: scaling[name] for name in _ROPE_FIELDS.get(law, ()) if scaling.get(name) is not None
    }
    for name in _ROPE_REQUIRED.get(law, ()):
        if name not in given:
            raise CorruptCheckpoint(f"RoPE law {law!r} needs {name!r}; check rope_scaling")
    given = {name: _rope_value(name, value) for name, value in given.items()}
    original = raw.get("original_max_position_embeddings")
    if law in ("llama3", "yarn", "longrope") and original is not None:
        given["original_max_position_embeddings"] = int(original)
    elif raw["model_type"] == "phi3" and law == "longrope":
        given.setdefault("original_max_position_embeddings", 4096)
    if law in ("yarn", "longrope") and "factor" not in given:
        trained = given.get("original_max_position_embeddings") or _max_positions(raw)
        given["factor"] = _max_positions(raw) / int(trained)
    return given


def _rope_value(name: str, value: Any) -> Any:
    if name in ("short_factor", "long_factor"):
        return tuple(float(item) for item in value)
    kinds: dict[str, type] = {"truncate": bool, "original_max_position_embeddings": int}
    return kinds.get(name, float)(value)


def _every_layer(raw: Json, num_layers: int) -> tuple[int, ...]:
    window = int(raw.get("sliding_window") or 0)
    return (window,) * num_layers if window else ()


def _upper_layers(raw: Json, num_layers: int) -> tuple[int, ...]:
    """Qwen's windows: only if switched on, then by ``layer_types`` or past a count of layers."""
    window = int(raw.get("sliding_window", 4096) or 0) if raw.get("use_sliding_window") else 0
    kinds = raw.get("layer_types")
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return _layers_of(kinds, window, num_layers)


def _layers_of(kinds: Sequence[str], window: int, num_layers: int) -> tuple[int, ...]:
    """``window`` in the layers that ``kinds`` calls sliding."""
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(
            f"layer types {unknown} are not implemented; supported: full and sliding"
        )
    if len(kinds) != num_layers:
        raise CorruptCheckpoint(
            f"layer_types names {len(kinds)} layers, the model has {num_layers}"
        )
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _llama(raw: Json) -> ModelConfig:
    shape, bias = _shape(raw), bool(raw.get("attention_bias", False))
    return ModelConfig(
        **shape,
        rope=_rope(raw, shape["head_dim"]),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=_activation(raw, "silu"),  # type: ignore[arg-type]
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def _mistral(raw: Json) -> ModelConfig:
    shape = _shape({"num_key_value_heads": 8, **raw})
    raw, num_layers = {"sliding_window": 4096, **raw}, shape["num_layers"]
    # Ministral goes by Mistral's name, and has its window in some layers only
    kinds = raw.get("layer_types")
    windows = (
        _every_layer(raw, num_layers)
        if kinds is None
        else _layers_of(kinds, int(raw["sliding_window"] or 0), num_layers)
    )
    return ModelConfig(
        **shape,
        rope=_rope(raw, shape["head_dim"]),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=_activation(raw, "silu"),  # type: ignore[arg-type]
        windows=windows,
    )


def _qwen2(raw: Json) -> ModelConfig:
    shape = _shape(raw)
    return ModelConfig(
        **shape,
        rope=_rope(raw, shape["head_dim"]),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=_activation(raw, "silu"),  # type: ignore[arg-type]
        qkv_bias=True,
        windows=_upper_layers(raw, shape["num_layers"]),
    )


def _qwen3(raw: Json) -> ModelConfig:
    shape, bias = _shape({"head_dim": 128, **raw}), bool(raw.get("attention_bias", False))
    return ModelConfig(
        **shape,
        rope=_rope(raw, shape["head_dim"]),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=_activation(raw, "silu"),  # type: ignore[arg-type]
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=_upper_layers(raw, shape["num_layers"]),
    )


def _phi(raw: Json) -> ModelConfig:
    if raw.get("qk_layernorm"):
        raise UnsupportedModel(
            "Phi with qk_layernorm is not implemented; use a checkpoint without it"
        )
    shape = _shape(raw)
    return ModelConfig(
        **shape,
        rope=_rope(raw, shape["head_dim"], default_fraction=0.5),
        norm_eps=float(raw.get("layer_norm_eps", 1e-5)),
        norm="layer",
        activation=_activation(raw, "gelu_new"),  # type: ignore[arg-type]
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        lm_head_bias=True,
        parallel_residual=True,
    )


def _phi3(raw: Json) -> ModelConfig:
    shape = _shape(raw)
    return ModelConfig(
        **shape,
        rope=_rope(raw, shape["head_dim"]),
        norm_eps=float(raw.get("rms_norm_eps", 1e-5)),
        activation=_activation(raw, "silu"),  # type: ignore[arg-type]
        windows=_every_layer(raw, shape["num_layers"]),
    )


_FAMILIES: dict[str, Callable[[Json], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi": _phi,
    "phi3": _phi3,
}
