"""Whatever the headers of a checkpoint's weights and their index say, no byte is read that is not
a tensor's own."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from looseleaf.config import EngineConfig
from looseleaf.llm.load import load_model
from tests.models.hostile import DEEP, WEIGHTS, refused, rewrite_header

INDEX = "model.safetensors.index.json"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.mark.parametrize(
    "item",
    [
        *("null", "[]", "{}", "3", '{"dtype": [], "shape": [2], "data_offsets": [0, 8]}'),
        '{"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}',
        '{"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}',
        '{"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}',
        f'{{"dtype": "F32", "shape": [{2**62}], "data_offsets": [0, 8]}}',
        f'{{"dtype": "F32", "shape": {[2**62] * 100_000}, "data_offsets": [0, 8]}}',
        '{"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}',
        '{"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}',
        '{"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}',
        '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}',
        '{"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}',
        '{"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}',
        f'{{"dtype": "F32", "shape": [2], "data_offsets": [{2**64}, {2**64 + 8}]}}',
        DEEP,
    ],
)
def test_a_tensor_that_has_no_place_in_its_file_is_refused(folder: Path, item: str) -> None:
    changed = f'{{"{NORM}": {item}}}'
    rewrite_header(folder, lambda header: changed, lambda data: data[:8])
    refused(folder, r"model\.safetensors is not a whole safetensors file|can't be read as JSON")


def test_tensors_that_overlap_or_leave_bytes_between_are_refused(folder: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"

    def share(header: dict[str, Any]) -> None:
        header[bias]["data_offsets"] = header[bias.replace(".0.", ".1.")]["data_offsets"]

    rewrite_header(folder, share)
    refused(folder, "does not begin where the one before it ends")


def test_a_tensor_that_stands_twice_in_a_header_is_refused(folder: Path) -> None:
    def twice(header: dict[str, Any]) -> str:
        return f'{json.dumps(header)[:-1]}, "{NORM}": {json.dumps(header[NORM])}}}'

    rewrite_header(folder, twice)
    refused(folder, f"'{NORM}' occurs twice")


def test_a_header_of_gigabytes_is_not_read(folder: Path) -> None:
    with (folder / WEIGHTS).open("wb") as file:
        file.write((200 << 30).to_bytes(8, "little"))
        file.truncate(300 << 30)
    refused(folder, "its header has 214748364800 bytes, and a header has 33554432 at most")


@pytest.mark.parametrize("name", [WEIGHTS, "other.safetensors"])
def test_weights_that_are_no_file_are_named(folder: Path, name: str) -> None:
    makers: list[Callable[[Path], object]] = [
        *(Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")),
        lambda path: path.symlink_to(path.name),
    ]
    for make in makers:
        for path in folder.glob("*.safetensors"):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        make(folder / name)
        refused(folder, f"{name} is not a whole safetensors file")


def shard(folder: Path) -> dict[str, str]:
    """Splits the weights in two files, and gives the index for them."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {name: f"{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    return weight_map


@pytest.mark.parametrize("written", ["3", "[]", "null", '{"a": 1}', '{"a": []}', DEEP, '"x"'])
def test_an_index_of_another_form_is_named(folder: Path, written: str) -> None:
    shard(folder)
    (folder / INDEX).write_text(f'{{"weight_map": {written}}}')
    refused(folder, INDEX)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "points outside its folder") for name in ("..", ".", "", "/etc/passwd", "a/b")),
        *((name, "which is missing") for name in ("x" * 5000, "absent.safetensors", "a\0b")),
        ("config.json", "config.json is not a whole safetensors file"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(folder: Path, name: str, words: str) -> None:
    weight_map = {**shard(folder), EMBEDDING: name}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, words)


def test_an_index_that_names_the_wrong_shard_is_refused(folder: Path) -> None:
    weight_map = shard(folder)
    other = {"0.safetensors": "1.safetensors", "1.safetensors": "0.safetensors"}
    weight_map[NORM] = other[weight_map[NORM]]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, f"lists tensors in files that do not hold them: {NORM}")


def test_of_a_tensor_in_two_shards_the_index_says_which_counts(folder: Path) -> None:
    right, weight_map = load_file(folder / WEIGHTS)[NORM], shard(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weight_map, NORM: "0.safetensors"}}))
    for number, tensor in enumerate((right, right + 1)):
        path = folder / f"{number}.safetensors"
        save_file({**load_file(path), NORM: tensor}, path)
    loaded = load_model(folder, EngineConfig(device="cpu", dtype="float32"))
    assert loaded.decoder.weights.final_norm.weight.equal(right)
