"""Gemma 4's fields and defaults: layers differ in heads, sizes, RoPE laws, and in KV of their own.

Only the text model is read. Images and audio are refused as content of a prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from looseleaf.config import ExpertConfig, LayerHeads, LayerInputs, ModelConfig, RopeConfig
from looseleaf.errors import CorruptCheckpoint, UnsupportedModel
from looseleaf.models.checkpoint.fields import Json, mapping, number, rows, shown, switch, whole
from looseleaf.models.config.families import activation, shape_fields, soft_cap, windows_of
from looseleaf.models.config.rope_reader import ropes_by_kind
from looseleaf.models.packing import stored_heads

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULTS = {
    **{"vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216},
    **{"num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"head_dim": 256, "tie_word_embeddings": True},
}
_ROPES = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
# far above the values of real models
_MAX_EXPERTS, _MAX_HEAD_DIM = 4096, 1 << 16


def _gemma4(raw: Json) -> ModelConfig:
    raw = {**_DEFAULTS, "sliding_window": 512, "hidden_size_per_layer_input": 256, **raw}
    experts = _experts(raw) if switch(raw, "enable_moe_block") else None
    return replace(_text(raw), layer_inputs=_layer_inputs(raw), experts=experts)


def _gemma4_unified(raw: Json) -> ModelConfig:
    return _text({**_DEFAULTS, "sliding_window": 1024, **raw})


def _whole_model(raw: Json) -> ModelConfig:
    """The text model of a checkpoint that also has towers for images and audio."""
    text = {**mapping(raw, "text_config")}
    outer = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
    text |= {name: raw[name] for name in outer if name in raw and name not in text}
    text["model_type"] = f"{raw['model_type']}_text"
    return GEMMA4[text["model_type"]](text)


def _text(raw: Json) -> ModelConfig:
    if raw.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel(
            "use_bidirectional_attention is 'all': this model reads in both directions, to embed "
            "texts, and Looseleaf only continues them; use a causal language model"
        )
    shape, bias = shape_fields(raw), switch(raw, "attention_bias")
    kinds = _kinds(raw, shape["num_layers"])
    heads = _heads(raw, kinds)
    num_kv_heads, head_dim = stored_heads(heads)
    ropes = _ropes(raw, kinds, heads, head_dim)
    num_shared = whole(raw, "num_kv_shared_layers", 0, least=0, most=shape["num_layers"] - 1)
    first = shape["num_layers"] - num_shared
    if not set(kinds) <= set(kinds[:first]):
        raise CorruptCheckpoint(
            f"num_kv_shared_layers is {num_shared}, and the first {first} layers lack one of the "
            "kinds of the others, whose KV those read; correct num_kv_shared_layers or layer_types"
        )
    sizes = ()
    if num_shared and switch(raw, "use_double_wide_mlp"):
        inner = shape["intermediate_size"]
        sizes = (inner,) * first + (2 * inner,) * num_shared
    own = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return ModelConfig(
        **{**shape, **own},
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        activation=activation(raw, "gelu_pytorch_tanh", "hidden_activation"),  # type: ignore[arg-type]
        rope=ropes[-1],
        layer_ropes=ropes,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        embedding_multiplier=shape["hidden_size"] ** 0.5,
        softmax_scale=1.0,
        final_soft_cap=soft_cap(raw, "final_logit_softcapping", None),
        windows=windows_of(kinds, whole(raw, "sliding_window"), shape["num_layers"]),
        layer_heads=heads,
        num_kv_shared=num_shared,
        layer_intermediate_sizes=sizes,
        layer_scalars=True,
    )


def _kinds(raw: Json, num_layers: int) -> list[Any]:
    kinds = rows(raw, "layer_types")
    if raw.get("layer_types") is None:
        kinds = [_FULL if (i + 1) % 6 == 0 else _SLIDING for i in range(num_layers)]
    # Transformers makes the last layer a full one
    return [*kinds[:-1], _FULL]


def _heads(raw: Json, kinds: Sequence[str]) -> tuple[LayerHeads, ...]:
    """The heads of every layer: by layer if given, else those of full and of sliding layers."""
    by_layer, tied = mapping(raw, "per_layer_config"), switch(raw, "attention_k_eq_v")
    full: dict[str, Any] = {}
    if raw.get("per_layer_config") is None:
        full["head_dim"] = whole(raw, "global_head_dim", 512, most=_MAX_HEAD_DIM)
        if tied and raw.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = whole(raw, "num_global_key_value_heads")
    heads = []
    for layer, kind in enumerate(kinds):
        own = {**raw, **(full if kind == _FULL else {}), **mapping(by_layer, str(layer))}
        count = whole(own, "num_key_value_heads")
        if whole(raw, "num_attention_heads") % count:
            raise CorruptCheckpoint(
                f"layer {layer} has {count} KV heads, which its query heads can't evenly share; "
                "correct num_key_value_heads or per_layer_config"
            )
        dim = whole(own, "head_dim", most=_MAX_HEAD_DIM)
        heads.append(LayerHeads(count, dim, tied_values=tied and kind == _FULL))
    return tuple(heads)


def _ropes(
    raw: Json, kinds: Sequence[str], heads: Sequence[LayerHeads], stored_dim: int
) -> tuple[RopeConfig, ...]:
    """The law of every layer, over the pairs of stored heads."""
    raw = {**raw, "rope_parameters": raw.get("rope_parameters") or _ROPES}
    forms = {(kind, own.head_dim) for kind, own in zip(kinds, heads, strict=True)}
    laws = {}
    for kind, head_dim in forms:
        if kind not in mapping(raw, "rope_parameters"):
            raise CorruptCheckpoint(
                f"rope_parameters lacks {shown(kind)}; write the law of each kind of layer"
            )
        law = ropes_by_kind(raw, head_dim)[kind]
        own_dim = head_dim if head_dim != stored_dim else 0
        laws[kind, head_dim] = replace(
            law, head_dim=stored_dim, rotary_dim=stored_dim, own_dim=own_dim
        )
    return tuple(laws[kind, own.head_dim] for kind, own in zip(kinds, heads, strict=True))


def _layer_inputs(raw: Json) -> LayerInputs | None:
    # null is 0 in Transformers
    dim = whole(raw, "hidden_size_per_layer_input", 0, least=0)
    if not dim:
        return None
    size = whole(raw, "vocab_size_per_layer_input", 262_144)
    if size < whole(raw, "vocab_size"):
        raise UnsupportedModel(
            f"vocab_size_per_layer_input {size} is less than vocab_size: tokens without inputs of "
            "layers are not implemented"
        )
    return LayerInputs(dim, size)


def _experts(raw: Json) -> ExpertConfig:
    return ExpertConfig(
        num_experts=whole(raw, "num_experts", most=_MAX_EXPERTS),
        top_k=whole(raw, "top_k_experts", most=_MAX_EXPERTS),
        intermediate_size=whole(raw, "moe_intermediate_size"),
        beside_mlp=True,
    )


GEMMA4: dict[str, Callable[[Json], ModelConfig]] = {
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4_unified,
    "gemma4": _whole_model,
    "gemma4_unified": _whole_model,
}
