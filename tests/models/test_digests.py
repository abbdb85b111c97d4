"""Laws: contents decide which model it is; a cached digest holds for an unchanged file only."""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from looseleaf.config import EngineConfig, TierConfig
from looseleaf.errors import CorruptCheckpoint
from looseleaf.llm.load import load_model
from looseleaf.models import model_fingerprint
from looseleaf.models.checkpoint import digests
from looseleaf.models.checkpoint.file_state import FileState
from tests.checkpoints import make_model

WEIGHTS = "model.safetensors"
MINUTE_NS = 60_000_000_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the cache, in a folder of the test's own. Small and young files are kept, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_SMALL_BYTES", 0)
    monkeypatch.setattr(digests, "_SETTLED_NS", -MINUTE_NS)
    return tmp_path / "cache" / "looseleaf" / "digests.json"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are read from end to end."""
    names: list[str] = []
    original = digests._read

    def watched(path: Path, before: FileState, pool: object) -> bytes:
        names.append(path.name)
        return original(path, before, pool)  # type: ignore[arg-type]

    monkeypatch.setattr(digests, "_read", watched)
    return names


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the same shape and size from another training run."""
    folder = tmp_path_factory.mktemp("other")
    make_model("llama", seed=1).save_pretrained(folder)
    return folder / WEIGHTS


def fingerprint(folder: Path) -> bytes:
    return model_fingerprint(folder, whole=True)


def copy_in_place(source: Path, target: Path) -> None:
    """As ``cp -p`` does: the inode stays, and the time of modification is the source's."""
    status = source.stat()
    with source.open("rb") as file, target.open("r+b") as out:
        shutil.copyfileobj(file, out)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip_byte(target: Path, offset: int = -8) -> None:
    """Changes one byte that no sample has, and puts the time of modification back."""
    status = target.stat()
    content = bytearray(target.read_bytes())
    content[offset] ^= 1
    with target.open("r+b") as file:
        file.write(content)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace_by(source: Path, target: Path) -> None:
    """As ``cp -p`` and ``mv``: another inode, and the time of modification of the one before."""
    status = target.stat()
    shutil.copy(source, target.with_suffix(".new"))
    os.replace(target.with_suffix(".new"), target)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize(
    "change", [copy_in_place, replace_by, lambda source, target: flip_byte(target)]
)
def test_weights_changed_under_the_same_time_are_another_model(
    change: Callable[[Path, Path], None], clamped: bool, folder: Path, other: Path
) -> None:
    # as reproducible archives have it
    then = 0 if clamped else time.time_ns() - MINUTE_NS
    for path in (folder / WEIGHTS, other):
        os.utime(path, ns=(then, then))
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    change(other, folder / WEIGHTS)
    assert (folder / WEIGHTS).stat().st_mtime_ns == then
    assert fingerprint(folder) != before


@pytest.mark.parametrize("whole", [False, True])
def test_a_configuration_changed_under_the_same_time_is_another_model(
    folder: Path, whole: bool
) -> None:
    path, before = folder / "config.json", model_fingerprint(folder, whole)
    status, raw = path.stat(), json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "rms_norm_eps": 1e-3}))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert model_fingerprint(folder, whole) != before


def test_a_time_that_is_set_is_no_other_model(folder: Path) -> None:
    before = fingerprint(folder)
    for then in (0, time.time_ns() - MINUTE_NS, time.time_ns() + MINUTE_NS):
        os.utime(folder / WEIGHTS, ns=(then, then))
        assert fingerprint(folder) == before


def test_one_content_at_several_paths_is_one_model(folder: Path, tmp_path: Path) -> None:
    before = fingerprint(folder)
    link, copy, hard = tmp_path / "link", tmp_path / "a copy", tmp_path / "hard"
    link.symlink_to(folder)
    shutil.copytree(folder, copy)
    (copy / WEIGHTS).rename(copy / "renamed.safetensors")
    shutil.copytree(folder, hard, copy_function=os.link)
    assert [fingerprint(path) for path in (link, copy, hard)] == [before] * 3


def test_a_sparse_copy_is_the_same_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / WEIGHTS
    content = path.read_bytes()
    start = len(content) // 2
    content = content[:start] + bytes(len(content) - start)
    path.write_bytes(content)
    before = fingerprint(folder)
    with path.open("wb") as file:
        file.write(content[:start])
        file.truncate(len(content))
    assert fingerprint(folder) == before


def test_a_kept_digest_spares_reading_until_the_file_changes(
    folder: Path, other: Path, read: list[str]
) -> None:
    first = fingerprint(folder)
    assert fingerprint(folder) == first
    assert read == [WEIGHTS]
    copy_in_place(other, folder / WEIGHTS)
    assert fingerprint(folder) != first
    assert read == [WEIGHTS] * 2


def test_small_files_are_always_read(
    folder: Path, cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_SMALL_BYTES", (folder / WEIGHTS).stat().st_size)
    assert fingerprint(folder) == fingerprint(folder)
    assert read == [WEIGHTS] * 2
    assert not cache.exists()


@pytest.mark.parametrize("ahead", [0, 60])
def test_a_file_that_was_just_written_is_not_kept(
    ahead: int, folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_SETTLED_NS", MINUTE_NS // 6)
    then = time.time_ns() + ahead * 1_000_000_000
    os.utime(folder / WEIGHTS, ns=(then, then))
    assert fingerprint(folder) == fingerprint(folder)
    assert read == [WEIGHTS] * 2


def freeze(monkeypatch: pytest.MonkeyPatch, changed_ns: int) -> None:
    """Has the file system say the same of a file, whatever is written to it."""
    state = FileState(7, 1 << 20, changed_ns, changed_ns)
    monkeypatch.setattr(digests.FileState, "of", lambda status: state._replace(size=status.st_size))


def test_another_model_under_the_same_state_is_told_by_samples(
    folder: Path, other: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze(monkeypatch, time.time_ns() - MINUTE_NS | 1)
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    copy_in_place(other, folder / WEIGHTS)
    assert fingerprint(folder) != before
    assert read == [WEIGHTS] * 2


@pytest.mark.parametrize("changed_ns", [0, 2**31 * 10**9, 1_700_000_000 * 10**9])
def test_a_clamped_or_rounded_time_of_change_is_not_trusted(
    changed_ns: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze(monkeypatch, changed_ns)
    before = fingerprint(folder)
    flip_byte(folder / WEIGHTS)
    assert fingerprint(folder) != before


@pytest.mark.parametrize(
    "change", [copy_in_place, replace_by, lambda source, target: os.truncate(target, 9)]
)
def test_a_file_that_changes_while_it_is_read_is_refused(
    change: Callable[[Path, Path], None],
    folder: Path,
    cache: Path,
    other: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = digests._digest_chunk

    def racing(descriptor: int, start: int, length: int) -> bytes:
        change(other, folder / WEIGHTS)
        return original(descriptor, start, length)

    monkeypatch.setattr(digests, "_digest_chunk", racing)
    with pytest.raises(CorruptCheckpoint, match=rf"{WEIGHTS} changed while .* load it again"):
        fingerprint(folder)
    assert not cache.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS, "chat_template.jinja"])
def test_a_checkpoint_that_changes_while_it_loads_is_refused(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from looseleaf.llm import load as loading

    original = loading.load_weights

    def racing(*arguments: object, **options: object) -> object:
        weights = original(*arguments, **options)
        path = folder / name
        copy_in_place(path, path) if path.exists() else path.write_text("")
        return weights

    monkeypatch.setattr(loading, "load_weights", racing)
    with pytest.raises(CorruptCheckpoint, match=f"{name} changed while the model was loaded"):
        load_model(folder, EngineConfig(device="cpu"))


def test_the_engine_of_a_disk_counts_every_byte(folder: Path, tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", tiers=TierConfig(disk_path=str(tmp_path / "disk")))
    before = load_model(folder, config).fingerprint
    flip_byte(folder / WEIGHTS)
    assert load_model(folder, config).fingerprint != before


def test_a_tokenizer_is_no_part_of_a_model_whose_keys_name_tokens(folder: Path) -> None:
    path, before = folder / "tokenizer.json", fingerprint(folder)
    first = load_model(folder, EngineConfig(device="cpu")).tokenizer.encode("travel requests")
    status, raw = path.stat(), json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "normalizer": {"type": "Prepend", "prepend": "x"}}))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint(folder) == before
    again = load_model(folder, EngineConfig(device="cpu")).tokenizer.encode("travel requests")
    assert again != first


def test_files_that_are_gone_are_forgotten(folder: Path, cache: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    fingerprint(folder)
    fingerprint(other)
    assert len(json.loads(cache.read_text())) == 2
    shutil.rmtree(folder)
    copy_in_place(other / WEIGHTS, other / WEIGHTS)
    fingerprint(other)
    assert list(json.loads(cache.read_text())) == [str((other / WEIGHTS).resolve())]


@pytest.mark.parametrize("item", ["3", '["b"]', '[1, 2, 3, "ab"]', '[1, 2, 3, 4, "ab", "xy"]'])
def test_a_broken_cache_is_none(folder: Path, cache: Path, item: str) -> None:
    expected = fingerprint(folder)
    for content in ("", "[", "[1]", f'{{"{(folder / WEIGHTS).resolve()}": {item}}}'):
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(content)
        assert fingerprint(folder) == expected


def test_a_cache_that_can_not_be_written_is_reported(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.touch()
    with caplog.at_level(logging.WARNING, "looseleaf"):
        fingerprint(folder)
    assert "digests of weights can't be kept in" in caplog.text


def test_a_file_of_the_hub_s_cache_is_known_by_its_contents_not_its_name(
    folder: Path, pristine: Path, tmp_path: Path
) -> None:
    blob = tmp_path / "blobs" / ("0" * 64)
    blob.parent.mkdir()
    (folder / WEIGHTS).rename(blob)
    (folder / WEIGHTS).symlink_to(blob)
    before = fingerprint(folder)
    assert before == fingerprint(pristine)
    flip_byte(blob)
    assert fingerprint(folder) != before


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_every_byte_of_every_chunk_counts(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(digests, "_READ_BYTES", 30)
    path = tmp_path / "file"
    contents = [bytes(size)] + [bytes(i) + b"x" + bytes(size - i - 1) for i in range(0, size, 33)]
    seen = set()
    for content in contents:
        path.write_bytes(content)
        seen.add(digests.digest_files({path: b""})[path])
    assert len(seen) == len(contents)
