"""Which changes make another model, and what is read to know."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from looseleaf.models import fingerprint, model_fingerprint
from tests.checkpoints import make_model

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what is remembered, in a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "looseleaf" / "digests.json"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are read from end to end."""
    names: list[str] = []
    digest = hashlib.file_digest

    def watched(file: object, kind: str) -> object:
        names.append(Path(file.name).name)  # type: ignore[attr-defined]
        return digest(file, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", watched)
    return names


def change_row(folder: Path, row: int) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.embed_tokens.weight"][row] += 1
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def age(path: Path, seconds: float = 60.0) -> None:
    """Makes ``path`` that much older."""
    then = path.stat().st_mtime_ns - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


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


def test_what_was_digested_is_not_read_again_until_it_changes(
    folder: Path, read: list[str]
) -> None:
    age(folder / WEIGHTS)
    first = model_fingerprint(folder, whole=True)
    assert read == [WEIGHTS]
    assert model_fingerprint(folder, whole=True) == first
    assert read == [WEIGHTS]
    change_row(folder, 77)
    assert model_fingerprint(folder, whole=True) != first
    assert read == [WEIGHTS] * 2


def test_a_file_that_was_just_written_is_not_remembered(folder: Path, read: list[str]) -> None:
    age(folder / WEIGHTS, -60)
    model_fingerprint(folder, whole=True)
    model_fingerprint(folder, whole=True)
    assert read == [WEIGHTS] * 2


def test_files_that_are_gone_are_forgotten(folder: Path, cache: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    for path in (folder, other):
        age(path / WEIGHTS)
        model_fingerprint(path, whole=True)
    assert len(json.loads(cache.read_text())) == 2
    shutil.rmtree(folder)
    age(other / WEIGHTS)
    model_fingerprint(other, whole=True)
    assert list(json.loads(cache.read_text())) == [str((other / WEIGHTS).resolve())]


@pytest.mark.parametrize("content", ["", "[", "[1]", '{"a": 3}', '{"a": ["b"]}'])
def test_a_broken_memory_is_none(folder: Path, cache: Path, content: str) -> None:
    expected = model_fingerprint(folder, whole=True)
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(content)
    assert model_fingerprint(folder, whole=True) == expected


def test_a_memory_that_can_not_be_written_is_told(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = model_fingerprint(folder, whole=True)
    age(folder / WEIGHTS)
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.touch()
    assert model_fingerprint(folder, whole=True) == expected
    assert "digests of weights can't be kept in" in caplog.text


def test_a_file_of_the_hub_s_cache_is_known_by_its_name(
    folder: Path, pristine: Path, tmp_path: Path, read: list[str]
) -> None:
    content = (folder / WEIGHTS).read_bytes()
    blob = tmp_path / "blobs" / hashlib.sha256(content).hexdigest()
    blob.parent.mkdir()
    (folder / WEIGHTS).rename(blob)
    (folder / WEIGHTS).symlink_to(blob)
    found = model_fingerprint(folder, whole=True)
    assert read == []
    # and it is the same model as a copy outside of that cache
    assert found == model_fingerprint(pristine, whole=True)


def test_threads_digest_files_side_by_side_in_their_order(folder: Path, read: list[str]) -> None:
    paths = []
    for number in range(5):
        path = folder / f"{number}.bin"
        path.write_bytes(bytes([number]) * 1000 * (5 - number))
        paths.append(path)
    expected = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert fingerprint._digests(paths) == expected
    assert sorted(read) == [path.name for path in paths]
