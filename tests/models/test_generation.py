"""What is taken of generation_config.json, and what is told of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models import names_of_advice, read_advice

QUIET = {"bos_token_id": 1, "eos_token_id": [2], "do_sample": True, "transformers_version": "5"}
SILENT = {"temperature": 1.0, "top_p": 1, "top_k": 0, "min_p": None, "num_beams": 1}


def write(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps({**QUIET, **fields}))
    return folder


def test_fields_of_sampling_that_change_anything_are_advice(tmp_path: Path) -> None:
    advice = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    assert read_advice(write(tmp_path, **advice, min_p=0.0)) == advice
    assert read_advice(write(tmp_path, **SILENT)) == {}


def test_a_folder_without_the_file_advises_nothing(tmp_path: Path) -> None:
    assert read_advice(tmp_path) == {}
    assert names_of_advice(tmp_path) == []


@pytest.mark.parametrize("wrong", [{"top_p": 0}, {"temperature": -1.0}, {"top_k": -5}])
def test_advice_that_nobody_can_follow_is_named(wrong: dict[str, Any], tmp_path: Path) -> None:
    (name,) = wrong
    with pytest.raises(CorruptCheckpoint, match=rf"generation_config\.json: {name} must be"):
        read_advice(write(tmp_path, **wrong))


def test_names_are_those_of_all_fields_that_would_change_an_answer(tmp_path: Path) -> None:
    asked = {"suppress_tokens": [3], "temperature": 0.6, "_from_model_config": 5}
    assert names_of_advice(write(tmp_path, **{**SILENT, **asked})) == [
        "suppress_tokens",
        "temperature",
    ]
