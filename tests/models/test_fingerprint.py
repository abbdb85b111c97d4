"""Which changes make another model, and what is read to know."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from looseleaf.models import model_fingerprint
from tests.checkpoints import make_model

WEIGHTS = "model.safetensors"


def change_row(folder: Path, row: int) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.embed_tokens.weight"][row] += 1
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("whole", [False, True])
def test_the_fingerprint_follows_the_content_not_the_folder(
    folder: Path, pristine: Path, whole: bool
) -> None:
    assert model_fingerprint(folder, whole) == model_fingerprint(pristine, whole)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("change", ["weights", "config"])
def test_another_model_has_another_fingerprint(folder: Path, change: str, whole: bool) -> None:
    before = model_fingerprint(folder, whole)
    if change == "weights":
        make_model("llama", seed=1).save_pretrained(folder)
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert model_fingerprint(folder, whole) != before


@pytest.mark.parametrize(
    "name",
    [
        *("query_pre_attn_scalar", "attn_logit_softcapping", "residual_multiplier"),
        *("attention_multiplier", "partial_rotary_factor"),
    ],
)
def test_what_changes_logits_and_no_tensor_is_another_model(folder: Path, name: str) -> None:
    before = model_fingerprint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: 0.75}))
    assert model_fingerprint(folder) != before


@pytest.mark.parametrize("row", [7, 77, 319])
def test_every_row_counts_where_all_bytes_do(folder: Path, row: int) -> None:
    before = model_fingerprint(folder, whole=True)
    change_row(folder, row)
    assert model_fingerprint(folder, whole=True) != before
