"""Law: any names and ties of tensors that Transformers resolves load, with Transformers' logits."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models import Decoder, load_weights, read_config
from tests.checkpoints import EXPERT_FAMILIES, FAMILIES, LATENT_FAMILIES, make_checkpoint
from tests.models.dense_attend import DenseAttend, sinks_of

WEIGHTS = "model.safetensors"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    changed = change(load_file(folder / WEIGHTS))
    save_file(
        {name: tensor.clone() for name, tensor in changed.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )


def error(folder: Path, dtype: torch.dtype = torch.float32) -> float:
    """The largest difference between logits here and in Transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    tokens = torch.arange(24)
    with torch.inference_mode():
        reference = model.eval()(tokens[None]).logits[0]
    config = read_config(folder).frozen_at(len(tokens))
    decoder = Decoder(config, load_weights(folder, config, dtype))
    attend = DenseAttend(decoder.config, sinks=sinks_of(decoder))
    attend.positions = tokens
    return float((decoder.logits(decoder.forward(tokens, attend)) - reference).abs().max())


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def with_second_prefix(tensors: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def with_either(tensors: Tensors) -> Tensors:
    names = {name: name.removeprefix("model.") if i % 2 else name for i, name in enumerate(tensors)}
    return {names[name]: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_with_and_without_the_prefix_are_one(family: str, tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    original = load_file(folder / WEIGHTS)
    # Transformers joins no experts whose prefixes differ
    mixed = () if family in (*EXPERT_FAMILIES, *LATENT_FAMILIES) else (with_either,)
    for change in (without_prefix, with_second_prefix, *mixed):
        save_file(original, folder / WEIGHTS, metadata={"format": "pt"})
        rewrite(folder, change)
        assert error(folder) <= 1e-4, change.__name__


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_of_any_dtype_and_values_is_that_of_transformers(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path, family, tie_word_embeddings=True)
    rounded = load_file(folder / WEIGHTS)[EMBEDDING].bfloat16()
    rewrite(folder, lambda tensors: {**tensors, EMBEDDING: rounded.float()})
    for head in (rounded, rounded.float(), rounded.double()):
        rewrite(folder, lambda tensors, head=head: {**tensors, HEAD: head})
        assert error(folder) <= 1e-4
        config = read_config(folder)
        weights = load_weights(folder, config, torch.float32, packed=False)
        assert weights.lm_head.weight is weights.embedding
    assert "tie_word_embeddings" not in caplog.text
    rewrite(folder, lambda tensors: {**tensors, HEAD: rounded * 1.5})
    with caplog.at_level(logging.WARNING, "looseleaf"):
        assert error(folder) <= 1e-4
    assert "set tie_word_embeddings to false in config.json" in caplog.text


@pytest.mark.parametrize("name", [HEAD, "model.lm_head.weight"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_embedding_that_is_stored_as_the_head_is_that_of_transformers(
    family: str, name: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, tie_word_embeddings=True)
    rewrite(folder, lambda t: {name if key == EMBEDDING else key: v for key, v in t.items()})
    assert error(folder) <= 1e-4


def test_a_tied_model_needs_an_embedding_or_a_head(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    rewrite(folder, lambda t: {key: v for key, v in t.items() if key != EMBEDDING})
    with pytest.raises(CorruptCheckpoint, match=f"lacks {EMBEDDING}"):
        load_weights(folder, read_config(folder), torch.float32)


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    rewrite(folder, lambda t: {key: v for key, v in t.items() if key != HEAD})
    with pytest.raises(CorruptCheckpoint, match=f"lacks {HEAD}"):
        load_weights(folder, read_config(folder), torch.float32)


def test_copies_of_a_tensor_by_two_names_are_equal(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, "norm.weight": tensors[NORM]})
    assert error(folder) <= 1e-4
    rewrite(folder, lambda tensors: {**tensors, "norm.weight": tensors[NORM] + 1})
    with pytest.raises(CorruptCheckpoint, match=rf"{NORM} and norm\.weight, which are one tensor"):
        load_weights(folder, read_config(folder), torch.float32)


def test_an_error_shows_the_stored_name(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, "extra.weight": torch.ones(2)})
    with pytest.raises(CorruptCheckpoint, match=r"no place for: extra\.weight"):
        load_weights(folder, read_config(folder), torch.float32)


def test_a_config_that_does_not_say_whether_it_is_tied_is_read_as_by_transformers(
    tmp_path: Path,
) -> None:
    from transformers import AutoConfig

    for family in FAMILIES:
        path = make_checkpoint(tmp_path / family, family) / "config.json"
        raw = json.loads(path.read_text())
        raw.pop("tie_word_embeddings", None)
        path.write_text(json.dumps(raw))
        theirs = AutoConfig.from_pretrained(path.parent).tie_word_embeddings
        assert read_config(path.parent).tie_word_embeddings == theirs, family
