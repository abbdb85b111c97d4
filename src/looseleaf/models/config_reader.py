"""From a checkpoint's ``config.json`` to a ``ModelConfig``: each family's words and defaults.

Both spellings of RoPE are read: ``rope_theta`` beside ``rope_scaling``, and ``rope_parameters``.
What Looseleaf does not implement is refused by name; nothing is skipped silently that would change
a logit.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from looseleaf.config import ModelConfig, RopeConfig
from looseleaf.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    InvalidOption,
    ModelError,
    UnsupportedModel,
)
from looseleaf.models.checkpoint import list_tensors, refuse_other_formats
from looseleaf.models.fields import (
    Json,
    as_number,
    mapping,
    number,
    rows,
    shown,
    switch,
    text,
    whole,
)
from looseleaf.models.files import read_json
from looseleaf.rope import rope_frequencies

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
_ORIGINAL = "original_max_position_embeddings"
# some times as many as any model has
_MOST_LAYERS, _MOST_HEAD_DIM = 10_000, 1 << 16
# what queries and keys may be multiplied by
_LEAST_FACTOR = 1e-6
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
    config = parse_config(read_json(path), str(path))
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
            f"{source}: model family {shown(family)} is not supported; supported: {known}"
        )
    try:
        _refuse_others(raw)
        config = build(raw)
        _require_frequencies(config.rope)
        return config
    except KeyError as error:
        raise CorruptCheckpoint(f"{source} lacks {error.args[0]!r}; download it again") from error
    except ModelError as error:
        raise type(error)(f"{source}: {error}") from error
    except InvalidOption as error:
        raise CorruptCheckpoint(f"{source}: {error}; correct it") from error


def _refuse_others(raw: Json) -> None:
    """Refuse what makes another model of the same tensors."""
    quantised = raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else ""
        raise UnsupportedModel(
            f"quantization_config asks for the method {shown(method)}; quantised checkpoints are "
            "not supported, use the one in float32, float16 or bfloat16 that it was made from"
        )
    if not switch(raw, "is_causal", True):
        raise UnsupportedModel(
            "is_causal is false: this model reads in both directions, to embed texts, and "
            "Looseleaf only continues them; use a causal language model"
        )


def _shape(raw: Json) -> dict[str, Any]:
    """What every family writes the same way."""
    num_qo_heads = whole(raw, "num_attention_heads")
    hidden_size = whole(raw, "hidden_size")
    return {
        "family": str(raw["model_type"]),
        "vocab_size": whole(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": whole(raw, "intermediate_size"),
        "num_layers": whole(raw, "num_hidden_layers", most=_MOST_LAYERS),
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": whole(raw, "num_key_value_heads", num_qo_heads),
        "head_dim": whole(raw, "head_dim", hidden_size // num_qo_heads, most=_MOST_HEAD_DIM),
        "max_position_embeddings": _max_positions(raw),
        "tie_word_embeddings": switch(raw, "tie_word_embeddings"),
        "torch_dtype": _dtype(raw),
    }


def _dtype(raw: Json) -> str:
    given = str(raw.get("dtype") or raw.get("torch_dtype") or "auto").removeprefix("torch.")
    if given != "auto" and given not in _DTYPES:
        raise UnsupportedModel(
            f"dtype {shown(given)} is not one that models are run in: write float32, float16, "
            "bfloat16 or auto into config.json"
        )
    return _DTYPES.get(given, given)


def _dtype_of_tensors(folder: Path) -> str:
    """That of the first tensor of floats, as Transformers has it for ``auto``."""
    stored = (_STORED.get(entry.dtype) for entry in list_tensors(folder).values())
    return next((dtype for dtype in stored if dtype), "float32")


def _max_positions(raw: Json) -> int:
    default = _DEFAULT_MAX_POSITIONS.get(str(raw["model_type"]), 2048)
    return whole(raw, "max_position_embeddings", default)


def _activation(raw: Json, default: str) -> str:
    name = text(raw, "hidden_act", default)
    if name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise UnsupportedModel(
            f"activation {shown(name)} is not implemented; Looseleaf knows {known}"
        )
    return _ACTIVATIONS[name]


def _rope(raw: Json, head_dim: int, default_fraction: float = 1.0) -> RopeConfig:
    """The law that either spelling describes; where both are there they must mean the same."""
    spellings = [*filter(None, (mapping(raw, n) for n in ("rope_parameters", "rope_scaling")))]
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
    law = text(scaling, "rope_type", text(scaling, "type", "default"))
    if raw["model_type"] == "phi3" and law in ("su", "yarn"):
        # early Phi-3 checkpoints call LongRoPE so
        law = "longrope"
    if law != "default" and law not in _ROPE_FIELDS:
        known = ", ".join(["default", *_ROPE_FIELDS])
        raise UnsupportedModel(f"RoPE law {shown(law)} is not implemented; Looseleaf knows {known}")
    fallback = number(raw, "partial_rotary_factor", default_fraction, most=1.0)
    fraction = number(scaling, "partial_rotary_factor", fallback, most=1.0)
    if fraction != 1.0 and raw["model_type"] not in _PARTIAL:
        raise UnsupportedModel(
            f"partial_rotary_factor {fraction} is not implemented for {raw['model_type']}, of "
            "which Transformers turns whole heads; delete it if the model was trained so"
        )
    return RopeConfig(
        head_dim=head_dim,
        rotary_dim=int(head_dim * fraction),
        theta=number(scaling, "rope_theta", number(raw, "rope_theta", 10_000.0)),
        law=law,  # type: ignore[arg-type]
        max_position_embeddings=_max_positions(raw),
        **_law_parameters(raw, law, scaling),
    )


def _law_parameters(raw: Json, law: str, scaling: Json) -> dict[str, Any]:
    names = [name for name in _ROPE_FIELDS.get(law, ()) if scaling.get(name) is not None]
    for name in _ROPE_REQUIRED.get(law, ()):
        if name not in names:
            raise CorruptCheckpoint(f"RoPE law {law!r} needs {name!r}; check rope_scaling")
    given = {name: _rope_value(name, scaling) for name in names}
    if law in ("llama3", "yarn", "longrope") and raw.get(_ORIGINAL) is not None:
        given[_ORIGINAL] = whole(raw, _ORIGINAL)
    elif raw["model_type"] == "phi3" and law == "longrope":
        given.setdefault(_ORIGINAL, 4096)
    if law in ("yarn", "longrope") and "factor" not in given:
        given["factor"] = _max_positions(raw) / given.get(_ORIGINAL, _max_positions(raw))
    return given


def _rope_value(name: str, scaling: Json) -> Any:
    if name in ("short_factor", "long_factor"):
        return tuple(as_number(f"each of {name}", item) for item in rows(scaling, name))
    if name == "truncate":
        return switch(scaling, name)
    return whole(scaling, name) if name == _ORIGINAL else number(scaling, name)


def _require_frequencies(rope: RopeConfig) -> None:
    """Refuse parameters that are numbers each, and together give none."""
    # a law has one range up to the original length and another behind it
    behind = rope.max_position_embeddings * (2 if rope.law == "dynamic" else 1)
    try:
        for length in (1, behind):
            inverse, factor = rope_frequencies(dataclasses.replace(rope, length=length))
            if not inverse.isfinite().all():
                raise ArithmeticError("a frequency is infinite")
            if not _LEAST_FACTOR < factor < 1 / _LEAST_FACTOR:
                raise ArithmeticError(f"scores would be multiplied by {factor:g} squared")
    except (ArithmeticError, ValueError) as error:
        if isinstance(error, InvalidOption):
            raise
        raise CorruptCheckpoint(
            f"no frequencies follow from the parameters of RoPE law {rope.law!r} ({error}); "
            "correct them"
        ) from error


def _every_layer(raw: Json, num_layers: int) -> tuple[int, ...]:
    window = whole(raw, "sliding_window", 0, least=0)
    return (window,) * num_layers if window else ()


def _upper_layers(raw: Json, num_layers: int) -> tuple[int, ...]:
    """Qwen's windows: only if switched on, then by ``layer_types`` or past a count of layers."""
    window = whole({"sliding_window": 4096, **raw}, "sliding_window", 0, least=0)
    window *= switch(raw, "use_sliding_window")
    kinds = rows(raw, "layer_types")
    if raw.get("layer_types") is None:
        first = whole(raw, "max_window_layers", 28, least=0)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return _layers_of(kinds, window, num_layers)


def _layers_of(kinds: Sequence[Any], window: int, num_layers: int) -> tuple[int, ...]:
    """``window`` in the layers that ``kinds`` calls sliding."""
    known = ("full_attention", "sliding_attention")
    unknown = sorted({str(kind) for kind in kinds if kind not in known})
    if unknown:
        raise UnsupportedModel(
            f"layer types {shown(unknown)} are not implemented; supported: full and sliding"
        )
    if len(kinds) != num_layers:
        raise CorruptCheckpoint(
            f"layer_types names {len(kinds)} layers, the model has {num_layers}"
        )
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _gated(raw: Json, norm_eps: float = 1e-6) -> dict[str, Any]:
    """What families with RMS norms and a gated MLP write the same way."""
    shape = _shape(raw)
    return {
        **shape,
        "rope": _rope(raw, shape["head_dim"]),
        "norm_eps": number(raw, "rms_norm_eps", norm_eps),
        "activation": _activation(raw, "silu"),
    }


def _llama(raw: Json) -> ModelConfig:
    bias = switch(raw, "attention_bias")
    return ModelConfig(
        **_gated(raw),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=switch(raw, "mlp_bias"),
    )


def _mistral(raw: Json) -> ModelConfig:
    raw = {"num_key_value_heads": 8, "sliding_window": 4096, **raw}
    common = _gated(raw)
    num_layers = common["num_layers"]
    # Ministral goes by Mistral's name, and has its window in some layers only
    windows = _every_layer(raw, num_layers)
    if raw.get("layer_types") is not None:
        window = whole(raw, "sliding_window", 0, least=0)
        windows = _layers_of(rows(raw, "layer_types"), window, num_layers)
    return ModelConfig(**common, windows=windows)


def _qwen2(raw: Json) -> ModelConfig:
    common = _gated(raw)
    windows = _upper_layers(raw, common["num_layers"])
    return ModelConfig(**common, qkv_bias=True, windows=windows)


def _qwen3(raw: Json) -> ModelConfig:
    common, bias = _gated({"head_dim": 128, **raw}), switch(raw, "attention_bias")
    return ModelConfig(
        **common,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=_upper_layers(raw, common["num_layers"]),
    )


def _phi(raw: Json) -> ModelConfig:
    if switch(raw, "qk_layernorm"):
        raise UnsupportedModel(
            "Phi with qk_layernorm is not implemented; use a checkpoint without it"
        )
    shape = _shape(raw)
    return ModelConfig(
        **shape,
        rope=_rope(raw, shape["head_dim"], default_fraction=0.5),
        norm_eps=number(raw, "layer_norm_eps", 1e-5),
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
    common = _gated(raw, norm_eps=1e-5)
    return ModelConfig(**common, windows=_every_layer(raw, common["num_layers"]))


_FAMILIES: dict[str, Callable[[Json], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi": _phi,
    "phi3": _phi3,
}
