"""A folder wins, a hub id is asked for with the right patterns, and neither is a sentence."""

from pathlib import Path

import pytest

from looseleaf.errors import CheckpointNotFound, CorruptCheckpoint
from looseleaf.models.checkpoint.hub import find_checkpoint


class FakeHub:
    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.asked: list[tuple[str, list[str], list[str]]] = []

    def __call__(
        self, repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        self.asked.append((repo_id, allow_patterns, ignore_patterns))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_a_folder_that_exists_is_taken_without_asking(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    assert find_checkpoint(tmp_path, hub) == tmp_path
    assert hub.asked == []


def test_only_safe_files_are_asked_for(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    assert find_checkpoint("owner/model-1.5B", hub) == tmp_path
    wanted = ["*.safetensors", "*.json", "*.jinja"]
    assert hub.asked == [
        ("owner/model-1.5B", wanted, ["consolidated*.safetensors", "*/*.safetensors"])
    ]


@pytest.mark.parametrize("error", [OSError("offline"), ValueError("bad id")])
def test_a_hub_that_does_not_answer_says_what_to_do(error: Exception) -> None:
    with pytest.raises(CheckpointNotFound, match=r"owner/model.*offline, download it elsewhere"):
        find_checkpoint("owner/model", FakeHub(error))


@pytest.mark.parametrize(
    "name", ["nowhere", "/no/such/folder", "a/b/c", "./here", "../there", "a/b.gguf"]
)
def test_what_is_no_hub_id_is_never_asked_for(name: str, tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    with pytest.raises(CheckpointNotFound, match=r"no (folder|file)"):
        find_checkpoint(name, hub)
    assert hub.asked == []


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointNotFound, match="is a file and not GGUF; give the folder"):
        find_checkpoint(tmp_path / "model.safetensors")


def test_an_empty_file_of_gguf_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CorruptCheckpoint, match="is not a whole GGUF file"):
        find_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/model", "a\0b"])
def test_names_that_no_folder_can_have_are_not_found(name: str) -> None:
    with pytest.raises(CheckpointNotFound, match="no folder"):
        find_checkpoint(name, FakeHub(OSError("offline")))


def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # to root, everything may be read
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(CheckpointNotFound, match="can't be read by this user"):
        find_checkpoint(tmp_path)
