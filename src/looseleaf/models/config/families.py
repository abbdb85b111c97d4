"""Each family's fields and defaults in ``config.json``, as Transformers interprets them."""

from collections.abc import Callable, Sequence
from typing import Any

from looseleaf.config import ModelConfig
from looseleaf.errors import CorruptCheckpoint, UnsupportedModel
from looseleaf.models.checkpoint.fields import Json, number, rows, shown, switch, text, whole
from looseleaf.models.config.rope_reader import (
    LEAST_FACTOR,
    max_positions,
    read_query_scaling,
    read_rope,
    rope_layers,
    ropes_by_kind,
    ropes_of,
)

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
}
# dtypes in config.json, and the dtype that a model runs in; nothing runs in float64
_DTYPES = {
    **{"float32": "float32", "float": "float32", "float64": "float32", "double": "float32"},
    **{"float16": "float16", "half": "float16", "bfloat16": "bfloat16"},
}
_GEMMA_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
# far above the values of real models
_MAX_LAYERS, _MAX_HEAD_DIM = 10_000, 1 << 16


def shape_fields(raw: Json) -> dict[str, Any]:
    """The fields that all families share."""
    num_qo_heads = whole(raw, "num_attention_heads")
    hidden_size = whole(raw, "hidden_size")
    return {
        "family": str(raw["model_type"]),
        "vocab_size": whole(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": whole(raw, "intermediate_size"),
        "num_layers": whole(raw, "num_hidden_layers", most=_MAX_LAYERS),
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": whole(raw, "num_key_value_heads", num_qo_heads),
        "head_dim": whole(raw, "head_dim", hidden_size // num_qo_heads, most=_MAX_HEAD_DIM),
        "max_position_embeddings": max_positions(raw),
        "tie_word_embeddings": switch(raw, "tie_word_embeddings"),
        "torch_dtype": _dtype(raw),
    }


def _dtype(raw: Json) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "auto").removeprefix("torch.")
    if dtype != "auto" and dtype not in _DTYPES:
        raise UnsupportedModel(
            f"dtype {shown(dtype)} is not one that models are run in: write float32, float16, "
            "bfloat16 or auto into config.json"
        )
    return _DTYPES.get(dtype, dtype)


def activation(raw: Json, default: str, key: str = "hidden_act") -> str:
    name = text(raw, key, default)
    if name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise UnsupportedModel(
            f"activation {shown(name)} is not implemented; Looseleaf knows {known}"
        )
    return _ACTIVATIONS[name]


def uniform_windows(raw: Json, num_layers: int) -> tuple[int, ...]:
    window = whole(raw, "sliding_window", 0, least=0)
    return (window,) * num_layers if window else ()


def _upper_windows(raw: Json, num_layers: int) -> tuple[int, ...]:
    """Qwen's windows: none unless ``use_sliding_window``; by ``layer_types`` or layer index."""
    window = whole({"sliding_window": 4096, **raw}, "sliding_window", 0, least=0)
    window *= switch(raw, "use_sliding_window")
    kinds = rows(raw, "layer_types")
    if raw.get("layer_types") is None:
        first = whole(raw, "max_window_layers", 28, least=0)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return windows_of(kinds, window, num_layers)


def _nope_windows(raw: Json, has_rope: Sequence[bool]) -> tuple[int, ...]:
    """SmolLM3's windows: none unless ``use_sliding_window``; by ``layer_types`` or without RoPE."""
    window = whole(raw, "sliding_window", 0, least=0)
    enabled = switch(raw, "use_sliding_window") and window > 0
    kinds = rows(raw, "layer_types")
    if raw.get("layer_types") is None:
        kinds = ["full_attention" if rotates else "sliding_attention" for rotates in has_rope]
        window *= enabled
    elif "sliding_attention" in kinds and not enabled:
        raise UnsupportedModel(
            "layer_types has sliding layers, and use_sliding_window or sliding_window is not set: "
            "set both, or write full_attention"
        )
    return windows_of(kinds, window, len(has_rope))


def windows_of(kinds: Sequence[Any], window: int, num_layers: int) -> tuple[int, ...]:
    """``window`` for each layer of kind ``sliding_attention``, 0 for others."""
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


def gated(raw: Json, norm_eps: float = 1e-6) -> dict[str, Any]:
    """The fields of families with RMS norms and a gated MLP."""
    shape = shape_fields(raw)
    return {
        **shape,
        "rope": read_rope(raw, shape["head_dim"]),
        "norm_eps": number(raw, "rms_norm_eps", norm_eps),
        "activation": activation(raw, "silu"),
    }


def _llama(raw: Json) -> ModelConfig:
    bias = switch(raw, "attention_bias")
    return ModelConfig(
        **gated(raw),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=switch(raw, "mlp_bias"),
    )


def _mistral(raw: Json) -> ModelConfig:
    raw = {"num_key_value_heads": 8, "sliding_window": 4096, **raw}
    common = gated(raw)
    num_layers = common["num_layers"]
    # Ministral uses Mistral's name and has windows in a part of its layers
    windows = uniform_windows(raw, num_layers)
    if raw.get("layer_types") is not None:
        window = whole(raw, "sliding_window", 0, least=0)
        windows = windows_of(rows(raw, "layer_types"), window, num_layers)
    return ModelConfig(**common, windows=windows)


def _ministral3(raw: Json) -> ModelConfig:
    # YaRN from 16,384 positions, if no law is given
    scaling = {
        **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0},
        **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 16_384},
        "llama_4_scaling_beta": 0.1,
    }
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "rope_parameters": scaling}
    raw = {**defaults, **raw}
    common = gated(raw, norm_eps=1e-5)
    return ModelConfig(
        **common,
        windows=uniform_windows(raw, common["num_layers"]),
        query_scaling=read_query_scaling(raw),
    )


def _qwen2(raw: Json) -> ModelConfig:
    common = gated(raw)
    windows = _upper_windows(raw, common["num_layers"])
    return ModelConfig(**common, qkv_bias=True, windows=windows)


def _qwen3(raw: Json) -> ModelConfig:
    common, bias = gated({"head_dim": 128, **raw}), switch(raw, "attention_bias")
    return ModelConfig(
        **common,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=_upper_windows(raw, common["num_layers"]),
    )


def _smollm3(raw: Json) -> ModelConfig:
    raw = {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True, **raw}
    common, bias = gated(raw), switch(raw, "attention_bias")
    has_rope = rope_layers(raw, common["num_layers"])
    return ModelConfig(
        **common,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=switch(raw, "mlp_bias"),
        layer_ropes=ropes_of(common["rope"], has_rope),
        windows=_nope_windows(raw, has_rope),
    )


def _phi(raw: Json) -> ModelConfig:
    if switch(raw, "qk_layernorm"):
        raise UnsupportedModel(
            "Phi with qk_layernorm is not implemented; use a checkpoint without it"
        )
    shape = shape_fields(raw)
    return ModelConfig(
        **shape,
        rope=read_rope(raw, shape["head_dim"], default_fraction=0.5),
        norm_eps=number(raw, "layer_norm_eps", 1e-5),
        norm="layer",
        activation=activation(raw, "gelu_new"),  # type: ignore[arg-type]
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        lm_head_bias=True,
        parallel_residual=True,
    )


def _phi3(raw: Json) -> ModelConfig:
    common = gated(raw, norm_eps=1e-5)
    return ModelConfig(**common, windows=uniform_windows(raw, common["num_layers"]))


def _gemma2(raw: Json) -> ModelConfig:
    raw = {**_GEMMA_DEFAULTS, **raw}
    common = gated(raw)
    kinds = rows(raw, "layer_types")
    if raw.get("layer_types") is None:
        layers = range(common["num_layers"])
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    return ModelConfig(
        **{**common, **_gemma(raw, common, kinds)},
        soft_cap=soft_cap(raw, "attn_logit_softcapping", 50.0),
        final_soft_cap=soft_cap(raw, "final_logit_softcapping", 30.0),
    )


def _gemma3(raw: Json) -> ModelConfig:
    raw = {**_GEMMA_DEFAULTS, **raw}
    shape = shape_fields(raw)
    kinds = rows(raw, "layer_types")
    if raw.get("layer_types") is None:
        pattern = whole(raw, "sliding_window_pattern", 6)
        layers = range(shape["num_layers"])
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in layers]
    ropes = ropes_by_kind(raw, shape["head_dim"])
    common = {**shape, "norm_eps": number(raw, "rms_norm_eps", 1e-6)}
    # raises for kinds without a RoPE law
    common |= _gemma(raw, common, kinds)
    return ModelConfig(
        **common,
        rope=ropes["full_attention"],
        layer_ropes=tuple(ropes[kind] for kind in kinds),
        qk_norm=True,
        # Transformers ignores attn_logit_softcapping here
        final_soft_cap=soft_cap(raw, "final_logit_softcapping", None),
    )


def _gemma(raw: Json, common: dict[str, Any], kinds: Sequence[Any]) -> dict[str, Any]:
    """The fields that Gemma 2 and 3 share, for layers of these ``kinds``."""
    if switch(raw, "use_bidirectional_attention"):
        raise UnsupportedModel(
            "use_bidirectional_attention is true: this model reads in both directions, to embed "
            "texts, and Looseleaf only continues them; use a causal language model"
        )
    bias = switch(raw, "attention_bias")
    window = whole({"sliding_window": 4096, **raw}, "sliding_window", 0, least=0)
    return {
        "activation": activation(raw, "gelu_pytorch_tanh", "hidden_activation"),
        "qkv_bias": bias,
        "output_bias": bias,
        "post_norms": True,
        "norm_offset": 1.0,
        "embedding_multiplier": common["hidden_size"] ** 0.5,
        "softmax_scale": factor(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
        "windows": windows_of(kinds, window, common["num_layers"]),
    }


def _glm(raw: Json) -> ModelConfig:
    # an absent fraction means half of each head, null means whole heads
    defaults = {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5}
    raw = {**defaults, **raw}
    return ModelConfig(
        **gated(raw, norm_eps=1.5625e-7),
        qkv_bias=switch(raw, "attention_bias", True),
        post_norms=raw["model_type"] == "glm4",
    )


def granite(raw: Json) -> ModelConfig:
    bias = switch(raw, "attention_bias")
    return ModelConfig(
        **gated(raw),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=switch(raw, "mlp_bias"),
        embedding_multiplier=factor(raw, "embedding_multiplier", 1.0),
        residual_multiplier=factor(raw, "residual_multiplier", 1.0),
        softmax_scale=factor(raw, "attention_multiplier", 1.0),
        logits_scaling=factor(raw, "logits_scaling", 1.0),
    )


def _olmo2(raw: Json) -> ModelConfig:
    bias = switch(raw, "attention_bias")
    return ModelConfig(
        **gated(raw, norm_eps=1e-5),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        joint_qk_norm=True,
        pre_norms=False,
        post_norms=True,
    )


def _exaone4(raw: Json) -> ModelConfig:
    raw = {"sliding_window": 4096, **raw}
    common, window = gated(raw, norm_eps=1e-5), whole(raw, "sliding_window", 0, least=0)
    num_layers, kinds = common["num_layers"], rows(raw, "layer_types")
    if raw.get("layer_types") is None:
        pattern = whole(raw, "sliding_window_pattern", 4)
        kinds = [
            "sliding_attention" if (i + 1) % pattern else "full_attention"
            for i in range(num_layers)
        ]
    # beside layers with windows, full layers have no RoPE
    has_rope = [not window or kind == "sliding_attention" for kind in kinds]
    return ModelConfig(
        **common,
        qk_norm=True,
        pre_norms=False,
        post_norms=True,
        layer_ropes=ropes_of(common["rope"], has_rope),
        windows=windows_of(kinds, window, num_layers),
    )


def factor(raw: Json, name: str, default: float) -> float:
    """A multiplier or divisor, within bounds. Raises CorruptCheckpoint."""
    factor = number(raw, name, default, most=1 / LEAST_FACTOR)
    if factor < LEAST_FACTOR:
        raise CorruptCheckpoint(
            f"{name} must be a number from {LEAST_FACTOR:g} to {1 / LEAST_FACTOR:g}, not "
            f"{factor:g}; correct it"
        )
    return factor


def soft_cap(raw: Json, name: str, default: float | None) -> float:
    """The soft cap of scores; 0 is no cap, as null is in ``config.json``."""
    fields = {name: default, **raw}
    return 0.0 if fields[name] is None else factor(fields, name, 1.0)


FAMILIES: dict[str, Callable[[Json], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "ministral3": _ministral3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "exaone4": _exaone4,
    "phi": _phi,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": _glm,
    "glm4": _glm,
    "granite": granite,
    "olmo2": _olmo2,
}
