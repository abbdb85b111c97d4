"""What config.json says, in either spelling, and what is refused with a sentence."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from looseleaf.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    ModelError,
    UnsupportedModel,
)
from looseleaf.models import read_config
from looseleaf.models.config.config_reader import parse_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def test_old_and_new_spelling_of_rope_are_one_configuration() -> None:
    scaling = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling["original_max_position_embeddings"] = 64
    old = parse_config({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    new = parse_config({**BASE, "rope_parameters": parameters})
    assert old == new
    assert (new.rope.theta, new.rope.law, new.rope.factor) == (5e5, "llama3", 8.0)


def test_null_scaling_is_the_default_law() -> None:
    assert parse_config({**BASE, "rope_scaling": None}).rope.law == "default"


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (YARN, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_type": "default"}, {**YARN, "rope_theta": 5e5}),
        # without a rope_theta of its own or beside it, it means another one
        (YARN, {**YARN, "rope_theta": 5e5}),
    ],
)
def test_two_spellings_of_rope_that_differ_are_refused(
    scaling: dict[str, Any], parameters: dict[str, Any]
) -> None:
    raw = {**BASE, "rope_scaling": scaling, "rope_parameters": parameters}
    with pytest.raises(UnsupportedModel, match="rope_parameters and rope_scaling are both there"):
        parse_config(raw)


def test_two_spellings_of_rope_that_mean_the_same_are_taken() -> None:
    both = {
        "rope_scaling": {**YARN, "type": "yarn"},
        "rope_parameters": {**YARN, "rope_theta": 5e5},
    }
    assert parse_config({**BASE, "rope_theta": 5e5, **both}).rope.factor == 8.0


def test_head_dim_is_given_or_derived() -> None:
    assert parse_config(BASE).head_dim == 16
    assert parse_config({**BASE, "head_dim": None}).head_dim == 16
    assert parse_config({**BASE, "head_dim": 24}).rope.rotary_dim == 24


def test_kv_heads_default_to_query_heads() -> None:
    raw = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert parse_config(raw).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, ()),
        ({"sliding_window": 8}, ()),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}, ()),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (0, 0, 0, 8)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, 0, 8, 0),
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows(family: str, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse_config({**BASE, "model_type": family, **changes}).windows == windows


def test_mistral_windows_every_layer_unless_null() -> None:
    mistral = {**BASE, "model_type": "mistral"}
    assert parse_config({**mistral, "sliding_window": 8}).windows == (8, 8, 8, 8)
    assert parse_config({**mistral, "sliding_window": None}).windows == ()


def test_mistral_follows_the_types_of_its_layers() -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    mistral = {**BASE, "model_type": "mistral", "layer_types": kinds}
    assert parse_config({**mistral, "sliding_window": 8}).windows == (0, 8, 0, 8)
    assert parse_config({**mistral, "sliding_window": None}).windows == ()
    assert parse_config(mistral).windows == (0, 4096, 0, 4096)
    with pytest.raises(UnsupportedModel, match="layer types"):
        parse_config({**mistral, "layer_types": ["chunked_attention"] * 4})


def test_phi_turns_half_of_each_head_by_default() -> None:
    config = parse_config({**BASE, "model_type": "phi"})
    assert (config.rope.rotary_dim, config.norm, config.parallel_residual) == (8, "layer", True)
    assert (
        parse_config({**BASE, "model_type": "phi", "partial_rotary_factor": 0.25}).rope.rotary_dim
        == 4
    )


def test_gemma_s_defaults_are_those_of_transformers() -> None:
    few = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    config = parse_config({**few, "model_type": "gemma2", "hidden_act": "silu"})
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (4, 256, True)
    assert (config.soft_cap, config.final_soft_cap, config.softmax_scale) == (50.0, 30.0, 1 / 16)
    assert (config.embedding_multiplier, config.norm_offset, config.post_norms) == (8.0, 1.0, True)
    assert (config.windows, config.activation) == ((4096, 0, 4096, 0), "gelu_new")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (8, 0, 8, 0)),
        ({"sliding_window": None}, ()),
        ({"layer_types": None}, (4096, 0, 4096, 0)),
        ({"layer_types": ["full_attention"] * 4}, ()),
    ],
)
def test_gemma_s_windows(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse_config({**BASE, "model_type": "gemma2", **changes}).windows == windows


def test_null_is_no_cap() -> None:
    null = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = parse_config({**BASE, "model_type": "gemma2", **null})
    assert (config.soft_cap, config.final_soft_cap) == (0.0, 0.0)


@pytest.mark.parametrize("family", ["glm", "glm4"])
def test_glm_turns_pairs_of_half_of_each_head_by_default(family: str) -> None:
    config = parse_config({**BASE, "model_type": family})
    assert (config.head_dim, config.rope.rotary_dim, config.rope.interleaved) == (128, 64, True)
    assert (config.qkv_bias, config.output_bias, config.norm_eps) == (True, False, 1.5625e-7)
    assert config.post_norms == (family == "glm4")
    # Transformers' default stands for what is not there, and null is whole heads
    null = parse_config({**BASE, "model_type": family, "partial_rotary_factor": None})
    assert null.rope.rotary_dim == 128


def test_olmo_2_norms_branches_only_and_all_heads_as_one() -> None:
    config = parse_config({**BASE, "model_type": "olmo2"})
    assert (config.pre_norms, config.post_norms, config.joint_qk_norm) == (False, True, True)
    assert (config.norm_eps, config.qkv_bias, config.output_bias) == (1e-5, False, False)


def test_granite_scales_its_scores_by_1_unless_told() -> None:
    config = parse_config({**BASE, "model_type": "granite"})
    assert config.softmax_scale == config.embedding_multiplier == config.logits_scaling == 1.0
    factors = {"attention_multiplier": 0.015625, "residual_multiplier": 0.22}
    config = parse_config({**BASE, "model_type": "granite", **factors})
    assert (config.softmax_scale, config.residual_multiplier) == (0.015625, 0.22)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        *(("bfloat16", "bfloat16"), ("torch.bfloat16", "bfloat16"), ("half", "float16")),
        *(("float64", "float32"), ("auto", "auto"), (None, "auto")),
    ],
)
def test_a_dtype_has_several_spellings(key: str, written: str | None, dtype: str) -> None:
    assert parse_config({**BASE, key: written}).torch_dtype == dtype


@pytest.mark.parametrize("written", ["int8", "float8_e4m3fn", "bf16", {"": "float16"}])
def test_a_dtype_that_no_model_is_run_in_is_refused(written: Any) -> None:
    with pytest.raises(UnsupportedModel, match="write float32, float16, bfloat16 or auto"):
        parse_config({**BASE, "torch_dtype": written})


@pytest.mark.parametrize("written", ["auto", None])
def test_a_dtype_that_is_left_open_is_that_of_the_first_floats(
    written: str | None, tmp_path: Path
) -> None:
    tensors = {
        "a": torch.ones(1, dtype=torch.int64),
        "b": torch.ones(1, dtype=torch.bfloat16),
        "c": torch.ones(1, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "dtype": written}))
    assert read_config(tmp_path).torch_dtype == "bfloat16"


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_longrope_goes_by_three_names_and_derives_its_factor(name: str) -> None:
    scaling = {"type": name, "short_factor": [1.0] * 8, "long_factor": [2] * 8}
    raw = {**BASE, "model_type": "phi3", "rope_scaling": scaling}
    rope = parse_config({**raw, "original_max_position_embeddings": 128}).rope
    assert (rope.law, rope.factor, rope.long_factor) == ("longrope", 4.0, (2.0,) * 8)


def test_an_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(
        UnsupportedModel,
        match=r"'mamba'.*deepseek_v2, .*exaone4, gemma2, .*gpt_oss, .*llama, ministral3, .*phi",
    ):
        parse_config({**BASE, "model_type": "mamba"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, "RoPE law 'spiral'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between layers"),
        ({"hidden_act": "relu2"}, "activation 'relu2'"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm"),
        ({"is_causal": False}, "reads in both directions"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "reads in both directions"),
        ({"model_type": "gemma2", "hidden_activation": "relu2"}, "activation 'relu2'"),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 4}, "layer types"),
        (
            {"model_type": "granite", "partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5 is not implemented for granite",
        ),
        ({"quantization_config": {"quant_method": "quip"}}, "quant_method is 'quip'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not implemented for llama"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["linear_attention"] * 4},
            "layer types .'linear_attention'",
        ),
    ],
)
def test_what_would_change_a_logit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        parse_config({**BASE, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers must be a whole number"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs 'factor'"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "names 1 layers"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping must be"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0.0}, "query_pre_attn_scalar must be"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling must be a number from"),
        ({"model_type": "granite", "residual_multiplier": -1.0}, "residual_multiplier must be"),
        ({"model_type": "granite", "embedding_multiplier": 1e9}, "embedding_multiplier must be"),
    ],
)
def test_values_that_make_no_sense_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=words):
        parse_config({**BASE, **changes})


def test_a_missing_key_is_named() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"config.json lacks 'vocab_size'"):
        parse_config({key: value for key, value in BASE.items() if key != "vocab_size"})


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"holds no config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(CorruptCheckpoint, match="can't be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([BASE]))
    with pytest.raises(CorruptCheckpoint, match="not a JSON object"):
        read_config(tmp_path)


def test_adapters_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    for write in (lambda: None, lambda: (tmp_path / "config.json").write_text(json.dumps(BASE))):
        write()
        with pytest.raises(UnsupportedModel, match=r"holds an adapter.*merge_and_unload\(\)"):
            read_config(tmp_path)


SMOL: dict[str, Any] = {**BASE, "model_type": "smollm3"}


def still(**options: Any) -> list[bool]:
    """Which layers turn nothing."""
    config = parse_config({**SMOL, **options})
    return [config.rope_of(layer).law == "none" for layer in range(config.num_layers)]


def test_smollm3_turns_all_layers_but_every_so_many_th_or_those_that_are_listed() -> None:
    assert still() == [False, False, False, True]
    assert still(no_rope_layer_interval=2) == [False, True, False, True]
    assert still(no_rope_layers=[0, 1, 1, 0, 1]) == [True, False, False, True]
    config = parse_config({**SMOL, "no_rope_layers": [1, 1, 1, 1]})
    assert config.layer_ropes == () and config.rope.theta == 2e6
    assert parse_config(SMOL).windows == ()


@pytest.mark.parametrize("layers", [[], [1, 1], [1, 1, 2, 0], [1, 1, 1, "x"]])
def test_smollm3_with_another_list_of_layers_is_refused(layers: list[Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match="a 0 or a 1 for each of 4 layers"):
        parse_config({**SMOL, "no_rope_layers": layers})


def test_smollm3_has_windows_only_where_they_are_switched_on() -> None:
    switched = {"use_sliding_window": True, "sliding_window": 5}
    assert parse_config({**SMOL, **switched}).windows == (0, 0, 0, 5)
    assert parse_config({**SMOL, "sliding_window": 5}).windows == ()
    kinds = ["sliding_attention", *["full_attention"] * 3]
    assert parse_config({**SMOL, **switched, "layer_types": kinds}).windows == (5, 0, 0, 0)
    with pytest.raises(UnsupportedModel, match="use_sliding_window or sliding_window is not set"):
        parse_config({**SMOL, "sliding_window": 5, "layer_types": kinds})


GEMMA3: dict[str, Any] = {**BASE, "model_type": "gemma3_text", "num_hidden_layers": 7}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def test_gemma3_in_the_words_of_older_files_is_what_transformers_writes_now() -> None:
    from transformers import Gemma3TextConfig

    old = {"rope_theta": 2e6, "rope_local_base_freq": 500.0, "rope_scaling": LINEAR}
    raw = {**GEMMA3, **old, "sliding_window_pattern": 3, "sliding_window": 5}
    config = parse_config(raw)
    written = Gemma3TextConfig(**{k: v for k, v in raw.items() if k != "model_type"}).to_dict()
    assert "full_attention" in written["rope_parameters"] and "rope_theta" not in written
    assert dataclasses.replace(parse_config(written), torch_dtype=config.torch_dtype) == config
    laws = [(rope.theta, rope.law, rope.factor) for rope in config.layer_ropes]
    near, far = (500.0, "default", 1.0), (2e6, "linear", 8.0)
    assert laws == [near, near, far, near, near, far, near]
    assert config.windows == (5, 5, 0, 5, 5, 0, 5)


GEMMA4: dict[str, Any] = {
    **{**BASE, "model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 32},
    **{"num_key_value_heads": 16, "head_dim": 256, "attention_k_eq_v": True},
    **{"hidden_size_per_layer_input": 0, "num_global_key_value_heads": 4},
}


@pytest.mark.parametrize(
    ("local", "full", "stored"),
    [(16, 4, (8, 512)), (8, 2, (4, 512)), (2, 2, (2, 512)), (1, 1, (1, 512)), (3, 1, (3, 512))],
)
def test_gemma4_stores_the_heads_of_all_layers_in_one_shape(
    local: int, full: int, stored: tuple[int, int]
) -> None:
    heads = {"num_attention_heads": 48, "num_key_value_heads": local}
    config = parse_config({**GEMMA4, **heads, "num_global_key_value_heads": full})
    assert (config.num_kv_heads, config.head_dim) == stored
    own = [(heads.num_kv_heads, heads.head_dim) for heads in config.layer_heads]
    assert own == [(local, 256)] * 5 + [(full, 512)]
    assert {rope.rotary_dim for rope in config.ropes} == {512}


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"num_global_key_value_heads": 32, "num_key_value_heads": 6}, ModelError, "evenly share"),
        (
            {"num_attention_heads": 96, "num_key_value_heads": 6, "global_head_dim": 256},
            UnsupportedModel,
            "divide each other",
        ),
        ({"use_bidirectional_attention": "all"}, UnsupportedModel, "reads in both directions"),
        ({"num_kv_shared_layers": 1}, CorruptCheckpoint, "lack one of the kinds"),
        ({"rope_parameters": {"full_attention": {}}}, CorruptCheckpoint, "rope_parameters lacks"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 2}, ModelError, "inputs"),
    ],
)
def test_gemma4_that_does_not_fit_is_a_sentence(
    more: dict[str, Any], error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse_config({**GEMMA4, **more})


def test_gemma3_has_the_defaults_of_transformers() -> None:
    config = parse_config(GEMMA3)
    assert [rope.theta for rope in config.layer_ropes] == [1e4] * 5 + [1e6, 1e4]
    assert config.windows == (4096,) * 5 + (0, 4096)
    assert config.head_dim == 256 and config.soft_cap == config.final_soft_cap == 0
    assert parse_config({**GEMMA3, "final_logit_softcapping": 30.0}).final_soft_cap == 30


def test_gemma3_with_one_law_in_rope_parameters_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="beside the laws of full_attention"):
        parse_config({**GEMMA3, "rope_parameters": {**LINEAR, "rope_theta": 1e6}})
