"""Models with latent attention: variants of the configuration, and files with further layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from looseleaf.errors import UnsupportedModel
from looseleaf.models import load_weights, read_config
from looseleaf.models.config.config_reader import parse_config
from looseleaf.rope import softmax_scale
from tests.checkpoints import make_checkpoint, make_model, write_checkpoint
from tests.models.test_logits import LENGTH, TOLERANCE, load, logits_in_chunks, worst

# config.json of DeepSeek-V2-Lite, without fields that change no logits
V2_LITE: dict[str, Any] = {
    **{"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048},
    **{"intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2},
    **{"n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    **{"routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    **{"norm_topk_prob": False, "scoring_func": "softmax", "q_lora_rank": None},
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000},
    **{"tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16"},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        **{"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096},
    },
}


@pytest.mark.parametrize(
    ("family", "overrides", "rope"),
    [
        ("deepseek_v2", {"topk_method": "greedy"}, {"mscale": 0.7, "mscale_all_dim": 0.7}),
        ("deepseek_v3", {"q_lora_rank": None}, {"mscale": 1.0, "mscale_all_dim": 1.0}),
        ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}, {}),
        ("deepseek_v3", {"first_k_dense_replace": 3}, {"mscale": 1.0, "mscale_all_dim": 0.5}),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, {}),
    ],
)
def test_logits_equal_transformers_for_variants(
    family: str, overrides: dict[str, Any], rope: dict[str, float], tmp_path: Path
) -> None:
    model = make_model(family, "yarn", **overrides)
    model.config.rope_parameters |= rope
    folder = write_checkpoint(tmp_path, model)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = torch.arange(LENGTH)
    with torch.inference_mode():
        reference = theirs(tokens[None]).logits[0]
    assert worst(logits_in_chunks(load(folder, LENGTH), tokens, [40, 8]), reference) <= TOLERANCE


def test_a_stored_key_has_the_rotated_dims_and_the_latent() -> None:
    config = parse_config(V2_LITE)
    assert (config.num_kv_heads, config.head_dim, config.kv_planes) == (1, 576, 1)
    assert (config.rope.rotary_dim, config.rope.interleaved) == (64, True)
    assert config.output_dim(0) == 16 * 128
    # 192 ** -0.5, times the square of 0.1 * 0.707 * ln(40) + 1
    assert abs(softmax_scale(config, 0) - 0.1147214) < 1e-6
    assert config.experts is not None
    assert (config.experts.num_shared, config.experts.dense_layers) == (2, (0,))


def test_kimi_k2_is_deepseek_v3_by_another_name() -> None:
    raw = {**V2_LITE, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    kimi, deepseek = (parse_config({**raw, "model_type": n}) for n in ("kimi_k2", "deepseek_v3"))
    assert kimi.experts == deepseek.experts
    assert (kimi.latent, kimi.softmax_scale) == (deepseek.latent, deepseek.softmax_scale)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias is true"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        parse_config({**V2_LITE, **changes})


def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek_v3")
    path = folder / "model.safetensors"
    save_file({**load_file(path), "model.layers.3.eh_proj.weight": torch.ones(2, 2)}, path)
    config = read_config(folder)
    assert len(load_weights(folder, config, torch.float32).layers) == 3
