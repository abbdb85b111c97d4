"""Checkpoints that are broken are refused by name; good ones load whole, sharded or not."""

import json
import platform
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from looseleaf.config import ModelConfig
from looseleaf.errors import CheckpointNotFound, CorruptCheckpoint, UnsupportedModel
from looseleaf.models import load_weights, model_fingerprint, read_config
from looseleaf.models.checkpoint.weights import _Reader
from looseleaf.models.layers import DecoderWeights, Norm
from looseleaf.models.linear import add_project, project, unpack
from looseleaf.models.quantized import QuantizedWeight
from tests.checkpoints import make_checkpoint

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST_Q = "model.layers.0.self_attn.q_proj.weight"


def load(folder: Path) -> DecoderWeights:
    return load_weights(folder, read_config(folder), torch.float32, packed=False)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def shard(folder: Path) -> Path:
    """Splits the checkpoint in two files with an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {name: files[i % 2] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / files[1]


def test_projections_are_fused(folder: Path) -> None:
    weights, tensors = load(folder), load_file(folder / WEIGHTS)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(weights.layers[0].qkv.weight, torch.cat([tensors[name] for name in names]))


def test_a_packed_matrix_multiplies_like_a_plain_one(folder: Path) -> None:
    config = read_config(folder)
    plain = load(folder).layers[0]
    packed = load_weights(folder, config, torch.float32).layers[0]
    assert torch.equal(unpack(packed.qkv.weight), plain.qkv.weight)
    hidden, residual = torch.randn(5, 64), torch.randn(5, 64)
    inner = torch.randn(5, 96)
    torch.testing.assert_close(project(hidden, packed.qkv), project(hidden, plain.qkv))
    torch.testing.assert_close(
        add_project(residual, inner, packed.down), add_project(residual, inner, plain.down)
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="packing is for x86")
def test_matrices_are_packed_on_this_machine(folder: Path) -> None:
    weights = load_weights(folder, read_config(folder), torch.float32)
    assert weights.lm_head.weight.is_mkldnn
    assert all(layer.qkv.weight.is_mkldnn for layer in weights.layers)
    assert not weights.embedding.is_mkldnn


def test_bfloat16_matrices_keep_their_bits_under_fp32(folder: Path) -> None:
    """In half the memory, with the products of their values."""
    rewrite(folder, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    plain = load(folder).layers[0]
    kept = load_weights(folder, read_config(folder), torch.float32).layers[0]
    assert isinstance(kept.qkv.weight, QuantizedWeight)
    assert kept.qkv.weight.nbytes == 2 * kept.qkv.weight.numel()
    assert torch.equal(unpack(kept.qkv.weight), plain.qkv.weight)
    hidden = torch.randn(5, 64)
    torch.testing.assert_close(project(hidden, kept.qkv), project(hidden, plain.qkv))
    without_c = load_weights(folder, read_config(folder), torch.float32, native=False)
    assert isinstance(without_c.layers[0].qkv.weight, torch.Tensor)


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    weights = load(make_checkpoint(tmp_path, "qwen3"))
    assert weights.lm_head.weight is weights.embedding


def test_sharded_and_single_checkpoints_load_the_same(folder: Path) -> None:
    whole = load(folder)
    shard(folder)
    parts = load(folder)
    assert torch.equal(parts.lm_head.weight, whole.lm_head.weight)
    for layer, other in zip(whole.layers, parts.layers, strict=True):
        assert torch.equal(layer.qkv.weight, other.qkv.weight)
        assert torch.equal(layer.down.weight, other.down.weight)


def tensors_of(weights: DecoderWeights) -> list[torch.Tensor]:
    """All of them, in order."""
    tensors = [weights.embedding, *weights.final_norm[:1], weights.lm_head.weight]
    for layer in weights.layers:
        projections = (layer.qkv, layer.output, layer.gate_up, layer.down)
        tensors += [layer.input_norm.weight, *(projection.weight for projection in projections)]
    return [unpack(tensor) for tensor in tensors]


@pytest.mark.parametrize("packed", [False, True])
def test_several_threads_load_the_same_bytes(
    folder: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard(folder)
    config, readers = read_config(folder), set()
    # layers wait for each other here, so that none is read before another has begun
    meeting, read = threading.Barrier(2, timeout=20), _Reader.norm

    def watched(self: _Reader, name: str, size: int, config: ModelConfig) -> Norm:
        if name.endswith("input_layernorm") and name.split(".")[2] in "01" and threads == 2:
            meeting.wait()
            readers.add(threading.get_ident())
        return read(self, name, size, config)

    monkeypatch.setattr(_Reader, "norm", watched)
    loaded = []
    for threads in (1, 2):
        with patch("os.cpu_count", return_value=threads):
            weights = load_weights(folder, config, torch.float32, packed=packed)
        loaded.append(tensors_of(weights))
    assert len(readers) == 2
    assert all(torch.equal(tensor, other) for tensor, other in zip(*loaded, strict=True))


def test_weights_come_in_the_dtype_asked_for(folder: Path) -> None:
    weights = load_weights(folder, read_config(folder), torch.bfloat16)
    assert weights.embedding.dtype == weights.layers[0].qkv.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder: Path, kept: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:kept])
    for read in (load, model_fingerprint):
        with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors .*download it again"):
            read(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(FIRST_Q))
    with pytest.raises(CorruptCheckpoint, match=f"lacks {FIRST_Q}; .* do not fit together"):
        load(folder)


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))
    with pytest.raises(CorruptCheckpoint, match=r"no place for: model\.extra\.weight"):
        load(folder)


def test_buffers_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(2)}))
    load(folder)


def test_a_tensor_of_the_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({FIRST_Q: torch.ones(3, 5)}))
    with pytest.raises(CorruptCheckpoint, match=rf"{FIRST_Q} has shape \[3, 5\]"):
        load(folder)


def test_quantised_tensors_are_refused(folder: Path) -> None:
    quantise = {FIRST_Q: torch.ones(96, 64, dtype=torch.int8)}
    rewrite(folder, lambda tensors: tensors.update(quantise))
    with pytest.raises(UnsupportedModel, match="stored as I8 without scales"):
        load(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder).unlink()
    with pytest.raises(
        CorruptCheckpoint, match=r"model-00002-of-00002\.safetensors, which is missing"
    ):
        load(folder)


def test_an_index_of_tensors_that_no_file_holds_is_refused(folder: Path) -> None:
    shard(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpoint, match=r"do not hold them: model\.ghost"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "can't be read as JSON"),
        ("{}", "not a safetensors index"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "points outside its folder"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(folder: Path, content: str, words: str) -> None:
    shard(folder)
    (folder / INDEX).write_text(content)
    with pytest.raises(CorruptCheckpoint, match=words):
        load(folder)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="pickle weights only, which can run code"):
        load(folder)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointNotFound, match="holds no"):
        load(folder)


def test_a_single_file_is_read_beside_an_index(folder: Path) -> None:
    whole, again = load(folder), shutil.copy(folder / WEIGHTS, folder.parent)
    missing = shard(folder)
    shutil.copy(again, folder)
    assert torch.equal(load(folder).lm_head.weight, whole.lm_head.weight)
    # a model that is saved again deletes its old shards, and not their index
    missing.unlink()
    assert torch.equal(load(folder).lm_head.weight, whole.lm_head.weight)


def test_names_and_shapes_are_checked_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: _Reader, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(_Reader, "_read", read)
    last = "model.layers.2.mlp.down_proj.weight"
    for change in (
        lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}),
        lambda tensors: tensors.update({last: torch.ones(2)}),
        lambda tensors: tensors.pop(last),
    ):
        rewrite(folder, change)
        with pytest.raises(CorruptCheckpoint, match="do not fit together"):
            load(folder)


def test_a_model_of_another_task_is_named_where_its_tensors_do_not_fit(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["LlamaModel"]}))
    rewrite(folder, lambda tensors: tensors.pop(FIRST_Q))
    with pytest.raises(CorruptCheckpoint, match=r"says LlamaModel, and .*ForCausalLM$"):
        load(folder)


def test_several_files_need_an_index(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).unlink()
    with pytest.raises(CorruptCheckpoint, match="holds 2 safetensors files but no"):
        load(folder)
