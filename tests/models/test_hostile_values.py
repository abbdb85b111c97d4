"""Whatever the JSON files of a checkpoint say, it loads or is refused by the name of the file."""

from pathlib import Path

import pytest

from looseleaf.config import EngineConfig
from looseleaf.errors import CorruptCheckpoint, InvalidOption
from looseleaf.llm.load import load_model
from tests.checkpoints import make_checkpoint
from tests.models.hostile import NO_OBJECTS, SETTINGS, WEIGHTS, put, refused, use

JSON_FILES = ("config.json", "generation_config.json", SETTINGS, "special_tokens_map.json")


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("content", NO_OBJECTS)
def test_a_file_that_is_no_object_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content, encoding="latin-1")
    refused(folder, name)


@pytest.mark.parametrize("name", [*JSON_FILES, "tokenizer.json"])
def test_a_file_of_gigabytes_is_not_read(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(300 << 30)
    refused(folder, f"{name} is larger than")


@pytest.mark.parametrize("name", JSON_FILES)
def test_json_that_python_reads_and_can_not_write_is_refused(folder: Path, name: str) -> None:
    for depth in (200, 700, 900):
        put(folder, name, "unread", "[" * depth + "]" * depth)
        refused(folder, f"{name} can't be read as JSON .it is nested too deep.; download it again")
    put(folder, name, "unread", '"\\ud800"')
    refused(folder, "half of a surrogate pair")
    put(folder, name, "unread", "1" * 5000)
    refused(folder, r"Exceeds the limit .4300 digits")


@pytest.mark.parametrize(
    ("key", "written"),
    [
        *((key, "Infinity") for key in ("num_hidden_layers", "head_dim", "rms_norm_eps")),
        *(("num_hidden_layers", written) for written in ("-1", "0", str(2**31), "1e308")),
        *(("hidden_size", written) for written in ("[]", '"64"', "true", "NaN", "64.5")),
        *(("num_key_value_heads", written) for written in ("0", "-0.5", "1e-320")),
        *(("max_position_embeddings", written) for written in ("-1", "0", '"12"', str(10**30))),
        *(("rms_norm_eps", written) for written in ("-1", '"1e-6"', "false", "1" + "0" * 4000)),
        *(("attention_bias", written) for written in ("1", '"no"', "[]")),
        *(("tie_word_embeddings", written) for written in ("0", '"true"')),
        *(("rope_parameters", written) for written in ("[]", '"yarn"', "3")),
        *(("rope_parameters.rope_theta", written) for written in ("-5", "0", "NaN", "[1]")),
        ("rope_parameters.rope_type", "[]"),
        ("hidden_act", "0"),
        ("is_causal", '"no"'),
    ],
)
def test_a_value_that_no_model_has_is_named(folder: Path, key: str, written: str) -> None:
    put(folder, "config.json", key, written)
    name = key.split(".")[-1]
    refused(folder, rf"config\.json: ({name} must be|no frequencies follow)")


YARN = {"attention_factor": "1e308", "beta_fast": "0", "factor": "1e308", "truncate": "1"}
LONGROPE = {"long_factor": "[1, 2]", "short_factor": "[0, 0, 0, 0]", "attention_factor": "0"}


@pytest.mark.parametrize(
    ("law", "key", "written"),
    [
        *(("yarn", *item) for item in YARN.items()),
        *(("longrope", *item) for item in LONGROPE.items()),
        ("linear", "factor", "0"),
        ("llama3", "high_freq_factor", "0.5"),
        ("yarn", "original_max_position_embeddings", "0"),
    ],
)
def test_rope_parameters_that_give_no_angle_are_refused_before_weights_are_read(
    law: str, key: str, written: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, "llama", law)
    (folder / WEIGHTS).unlink()
    put(folder, "config.json", f"rope_parameters.{key}", written)
    refused(folder, r"config\.json: ")


def test_more_positions_than_fit_the_memory_need_a_length(folder: Path) -> None:
    put(folder, "config.json", "max_position_embeddings", str(2**31 - 1))
    with pytest.raises(InvalidOption, match=r"2147483647 positions, .*: give max_model_len"):
        use(folder)
    assert load_model(folder, EngineConfig(device="cpu", max_model_len=64)).max_model_len == 64


def test_a_corrupt_configuration_is_no_option_of_the_caller(folder: Path) -> None:
    put(folder, "config.json", "num_key_value_heads", "3")
    with pytest.raises(CorruptCheckpoint, match="can't evenly share 3 KV heads; correct it"):
        use(folder)
