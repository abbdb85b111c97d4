"""Which checkpoint a name stands for."""

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf import LLM
from looseleaf.config import EngineConfig
from looseleaf.errors import CheckpointNotFound, CorruptCheckpoint
from looseleaf.llm import load as loading
from looseleaf.llm.load import find_model, make_room, reference_model
from looseleaf.models.checkpoint.checkpoint import list_tensors
from tests.checkpoints import VOCAB_SIZE, make_checkpoint


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("looseleaf-reference", "block"),
        ("looseleaf-reference-causal", "causal"),
        # the names before these are still taken
        ("looseleaf-block", "block"),
        ("looseleaf-causal", "causal"),
    ],
)
def test_a_model_that_ships_is_found_by_its_name(name: str, folder: str) -> None:
    assert find_model(name) == reference_model(name) == reference_model(folder)
    assert find_model(name).name == folder


def test_the_default_is_one_of_the_models_that_ship() -> None:
    assert find_model(None) == find_model("looseleaf-reference")


def test_a_folder_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "looseleaf-causal").mkdir()
    assert find_model("looseleaf-causal") == Path("looseleaf-causal")
    assert find_model("looseleaf-reference") == reference_model("block")


def test_an_engine_is_made_of_the_model_that_is_named() -> None:
    prints = set()
    for name in (None, "looseleaf-block", "looseleaf-causal"):
        with LLM(name, device="cpu", num_pages=8, max_model_len=64) as llm:
            prints.add(llm.engine.documents.keys.root)
    assert len(prints) == 2


def test_who_names_a_model_that_there_is_not_hears_of_those_that_ship() -> None:
    with pytest.raises(
        CheckpointNotFound, match="looseleaf-reference or looseleaf-reference-causal"
    ):
        find_model("looseleaf-casual")


@pytest.mark.parametrize("broken", ["tokenizer.json", "chat_template.jinja"])
def test_small_files_are_read_before_the_weights(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / broken).write_text("{% if")

    def read(*given: object, **named: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "load_weights", read)
    with pytest.raises(CorruptCheckpoint):
        loading.load_model(folder, EngineConfig(device="cpu"))


def test_a_tokenizer_with_more_tokens_than_the_model_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for size in (VOCAB_SIZE, 261):
        caplog.clear()
        folder = make_checkpoint(tmp_path / str(size), vocab_size=size)
        loading.load_model(folder, EngineConfig(device="cpu"))
        assert ("tokens that the model does not have" in caplog.text) == (size == 261)


@pytest.mark.parametrize("model", [5, b"folder", ["folder"]])
def test_a_model_is_a_name_or_a_folder(model: Any, unchecked: None) -> None:
    with pytest.raises(CheckpointNotFound, match="a folder, a hub id or a name, not"):
        LLM(model)


def test_what_generation_config_advises_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path)
    caplog.set_level("INFO", "looseleaf.llm.load")
    loading.load_model(folder, EngineConfig(device="cpu"))
    assert "generation_config.json" not in caplog.text
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    loading.load_model(folder, EngineConfig(device="cpu"))
    assert "generation_config.json has temperature, top_k: SamplingParams" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_take_more_than_is_free_are_told(
    dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, config = make_checkpoint(tmp_path), EngineConfig(device="cpu", dtype=dtype)
    numbers = sum(math.prod(entry.shape) for entry in list_tensors(folder).values())
    needed = numbers * getattr(torch, dtype).itemsize
    monkeypatch.setattr(loading, "available_memory", lambda: needed)
    loading.load_model(folder, config)
    assert "memory are free" not in caplog.text
    monkeypatch.setattr(loading, "available_memory", lambda: needed // 2)
    loading.load_model(folder, config)
    assert "memory are free, so loading may fail" in caplog.text
    assert ("or dtype='bfloat16'" in caplog.text) == (dtype == "float32")


@pytest.mark.parametrize(("device", "goes"), [("cuda", True), ("cpu", False)])
def test_a_model_for_a_gpu_finds_the_memory_of_engines_that_nobody_holds(
    device: str, goes: bool
) -> None:
    llm = LLM(device="cpu", num_pages=8, max_model_len=64)
    pool = weakref.ref(llm.engine.runner.pool)
    gc.disable()
    try:
        llm.close()
        del llm
        make_room(torch.device(device))
        assert (pool() is None) == goes
    finally:
        gc.enable()


def test_an_engine_that_nobody_closed_goes_with_whoever_held_it() -> None:
    llm = LLM(device="cpu", num_pages=8, max_model_len=64)
    engine = weakref.ref(llm.engine)
    del llm
    gc.collect()
    assert engine() is None
