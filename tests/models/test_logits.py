"""Law 8: logits agree with Transformers, for every family and RoPE law, however rows are split."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from looseleaf.models import Decoder, load_weights, read_config
from tests.checkpoints import (
    EXPERT_FAMILIES,
    FAMILIES,
    ORIGINAL_POSITIONS,
    ROPE_LAWS,
    make_checkpoint,
    make_model,
    supports,
    write_checkpoint,
)
from tests.models.dense_attend import DenseAttend, sinks_of

TOLERANCE = 1e-4
LENGTH = 48
SPLITS = ([48], [20, 20, 8], [36] + [1] * 12)
PAIRS = [(family, law) for family in FAMILIES for law in ROPE_LAWS if supports(family, law)]
EXPERTS = {
    # Transformers fails for layers that share KV without inputs of layers
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2},
    "moe_intermediate_size": 32,
}
# layers of both kinds that read the KV of others
SHARED = {
    **{"num_hidden_layers": 6, "num_kv_shared_layers": 3, "final_logit_softcapping": 1.5},
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}


def load(folder: Path, length: int, packed: bool = True) -> Decoder:
    config = read_config(folder).frozen_at(length)
    return Decoder(config, load_weights(folder, config, torch.float32, packed=packed))


def logits_in_chunks(decoder: Decoder, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    attend, logits, start = DenseAttend(decoder.config, sinks=sinks_of(decoder)), [], 0
    for rows in tokens.split(chunks):
        attend.positions = torch.arange(start, start + len(rows))
        logits.append(decoder.logits(decoder.forward(rows, attend)))
        start += len(rows)
    return torch.cat(logits)


def worst(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).abs().max())


@pytest.mark.parametrize(("family", "law"), PAIRS)
def test_logits_equal_transformers_in_prefill_chunks_and_decode(
    family: str, law: str, tmp_path: Path
) -> None:
    model = make_model(family, law)
    tokens = torch.randint(0, 320, (LENGTH,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        reference = model(tokens[None]).logits[0]
    decoder = load(write_checkpoint(tmp_path, model), LENGTH)
    for chunks in SPLITS:
        assert worst(logits_in_chunks(decoder, tokens, chunks), reference) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_with_plain_matrices(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    tokens = torch.arange(LENGTH)
    with torch.inference_mode():
        reference = model(tokens[None]).logits[0]
    decoder = load(write_checkpoint(tmp_path, model), LENGTH, packed=False)
    assert worst(logits_in_chunks(decoder, tokens, [40, 8]), reference) <= TOLERANCE


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "gemma4_text", "glm4", "granite", "olmo2", *EXPERT_FAMILIES]
)
def test_16_bit_logits_err_as_those_of_transformers(family: str, tmp_path: Path) -> None:
    exact = make_model(family)
    # weights that are numbers of 16 bits, so that their own rounding is no error
    model = make_model(family).to(torch.bfloat16)
    exact.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    tokens = torch.arange(LENGTH)
    with torch.inference_mode():
        truth, theirs = exact(tokens[None]).logits[0], model(tokens[None]).logits[0].float()
    config = read_config(write_checkpoint(tmp_path, model))
    decoder = Decoder(config, load_weights(tmp_path, config, torch.bfloat16))
    ours = logits_in_chunks(decoder, tokens, [LENGTH]).float()
    # of the usual row: rounding sends some rows of a mixture to another expert
    errors = [float((x - truth).square().mean(1).sqrt().median()) for x in (ours, theirs)]
    assert errors[0] <= errors[1], errors


def test_gemma3_in_the_words_of_older_files_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path, "gemma3_text") / "config.json"
    raw = json.loads(path.read_text())
    del raw["rope_parameters"]
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 3000.0, "rope_local_base_freq": 50.0, "rope_scaling": linear}
    path.write_text(json.dumps({**raw, **old}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = torch.arange(LENGTH)
    with torch.inference_mode():
        reference = model(tokens[None]).logits[0]
    assert worst(logits_in_chunks(load(tmp_path, LENGTH), tokens, [40, 8]), reference) <= TOLERANCE


def test_gemma4_beside_towers_is_its_text_model(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "text", "gemma4_text")
    whole = tmp_path / "whole"
    whole.mkdir()
    text = json.loads((plain / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    stored = load_file(plain / "model.safetensors")
    tensors = {n.replace("model.", "model.language_model.", 1): x for n, x in stored.items()}
    # Transformers ignores the keys of layers that read those of others
    unread = {n.replace("layers.1", "layers.3"): x for n, x in tensors.items() if "s.1.self" in n}
    more = {n: x.clone() for n, x in unread.items() if ".k_" in n}
    assert more and not set(more) & set(tensors)
    save_file(
        {**tensors, **more, "model.vision_tower.conv.weight": torch.ones(2)},
        whole / "model.safetensors",
    )
    tokens = torch.arange(LENGTH)
    first, second = (
        logits_in_chunks(load(folder, LENGTH), tokens, [LENGTH]) for folder in (plain, whole)
    )
    assert torch.equal(first, second)


def test_mistral_with_types_of_layers_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path, "mistral") / "config.json"
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "layer_types": kinds}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = torch.arange(LENGTH)
    with torch.inference_mode():
        reference = model(tokens[None]).logits[0]
    assert worst(logits_in_chunks(load(tmp_path, LENGTH), tokens, [40, 8]), reference) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_longrope_below_its_original_length_uses_the_short_factors(
    family: str, tmp_path: Path
) -> None:
    model = make_model(family, "longrope")
    tokens = torch.arange(ORIGINAL_POSITIONS)
    with torch.inference_mode():
        reference = model(tokens[None]).logits[0]
    folder = write_checkpoint(tmp_path, model)
    short, long = load(folder, ORIGINAL_POSITIONS), load(folder, LENGTH)
    assert worst(logits_in_chunks(short, tokens, [ORIGINAL_POSITIONS]), reference) <= TOLERANCE
    assert worst(logits_in_chunks(long, tokens, [ORIGINAL_POSITIONS]), reference) > 0.01


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": False}),
        ("llama", {"num_key_value_heads": 4, "mlp_bias": False, "hidden_act": "gelu"}),
        ("mistral", {"sliding_window": None, "head_dim": 32}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5}),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 3, "mlp_bias": True}),
        ("smollm3", {"no_rope_layers": [1, 1, 1], "attention_bias": False}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 5}),
        ("phi", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("phi3", {"sliding_window": None, "num_key_value_heads": 1}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma2", {"attention_bias": True, "layer_types": ["full_attention"] * 3}),
        ("gemma2", {"tie_word_embeddings": False, "hidden_activation": "gelu"}),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}),
        ("gemma3_text", {"final_logit_softcapping": 1.5, "attention_bias": True}),
        ("gemma4_text", {"num_hidden_layers": 7, "layer_types": None, "num_kv_shared_layers": 0}),
        ("gemma4_text", {"global_head_dim": 16, **EXPERTS}),
        ("gemma4_text", {"num_key_value_heads": 1, "attention_k_eq_v": False, **SHARED}),
        ("glm", {"attention_bias": False, "num_key_value_heads": 4}),
        ("glm4", {"tie_word_embeddings": True, "hidden_act": "gelu"}),
        ("olmo2", {"attention_bias": True, "num_key_value_heads": 4, "head_dim": 24}),
        ("granite", {"mlp_bias": False, "attention_bias": False, "tie_word_embeddings": True}),
        ("mixtral", {"sliding_window": None, "hidden_act": "gelu"}),
        ("qwen2_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("qwen3_moe", {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 5}),
        ("olmoe", {"attention_bias": True, "norm_topk_prob": True}),
        ("glm4_moe", {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "use_qk_norm": False}),
        ("glm4_moe", {"norm_topk_prob": False, "first_k_dense_replace": 2}),
    ],
)
def test_logits_equal_transformers_for_variants_of_a_family(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    if family == "qwen3" and overrides.get("use_sliding_window"):
        overrides = {**overrides, "max_window_layers": 1}
    model = make_model(family, **overrides)
    tokens = torch.randint(0, 320, (LENGTH,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        reference = model(tokens[None]).logits[0]
    decoder = load(write_checkpoint(tmp_path, model), LENGTH)
    assert worst(logits_in_chunks(decoder, tokens, [40, 8]), reference) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [[], [11], [0, 4, 5], [*range(12)]])
def test_rows_that_are_asked_for_are_those_of_a_whole_pass(
    family: str, rows: list[int], tmp_path: Path
) -> None:
    decoder = load(make_checkpoint(tmp_path, family), LENGTH)
    attend, numbers = (
        DenseAttend(decoder.config, sinks=sinks_of(decoder)),
        torch.tensor(rows, dtype=torch.int64),
    )
    attend.positions = torch.arange(12)
    whole = decoder.forward(torch.arange(12), attend)
    narrowed = DenseAttend(decoder.config, sinks=sinks_of(decoder))
    narrowed.positions = torch.arange(12)
    narrowed.asked = numbers
    hidden = decoder.forward(torch.arange(12), narrowed, last_rows=numbers)
    assert hidden.shape == (len(rows), 64)
    torch.testing.assert_close(hidden, whole[numbers])
    # what later tokens will read is there for all rows
    stored = decoder.config.kv_layer(decoder.config.num_layers - 1)
    torch.testing.assert_close(narrowed.keys[stored][0], attend.keys[stored][0])


def test_a_hook_sees_every_layer_and_may_narrow_the_rows(tmp_path: Path) -> None:
    decoder = load(make_checkpoint(tmp_path, "llama"), LENGTH)
    tokens, attend = torch.arange(12), DenseAttend(decoder.config, sinks=sinks_of(decoder))
    attend.positions = torch.arange(12)
    full = decoder.forward(tokens, attend)
    narrowed, seen = DenseAttend(decoder.config, sinks=sinks_of(decoder)), []
    narrowed.positions = torch.arange(12)

    def keep_last_rows(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        seen.append((layer, hidden.shape[0]))
        if layer != 2:
            return hidden
        # the row that stays needs the others' keys of this layer: those of the full run
        narrowed.positions = torch.arange(11, 12)
        narrowed.keys[2] = [attend.keys[2][0][:11]]
        narrowed.values[2] = [attend.values[2][0][:11]]
        narrowed.key_positions[2] = [torch.arange(11)]
        return hidden[11:]

    last = decoder.forward(tokens, narrowed, keep_last_rows)
    assert seen == [(0, 12), (1, 12), (2, 12)]
    assert last.shape == (1, 64)
    assert worst(last, full[11:]) <= 1e-5
