"""Law: sizes that no model has are refused before a parser works on them; those of models pass."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models.checkpoint import checkpoint, header
from looseleaf.models.checkpoint.checkpoint import INDEX_NAME, list_tensors
from looseleaf.models.checkpoint.files import JsonLimits, parse_json
from looseleaf.models.tokenizer.limits import TokenizerLimits, _growth, require_limits
from tests.models.hostile import SETTINGS, WEIGHTS, put, refused

JSON_FILES = ("config.json", "generation_config.json", SETTINGS, "special_tokens_map.json")
PATH = Path("tokenizer.json")
Step = dict[str, Any]


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_file_of_a_million_numbers_is_refused(folder: Path, name: str) -> None:
    put(folder, name, "unread", "[" + "1," * 1_000_000 + "1]")
    refused(folder, rf"{name} has about 100\d{{4}} values, and such a file has 1000000 at most")


@pytest.mark.parametrize("text", ['{"a": [1, 2]}', '{"a": {"b": {}}}', '{"a": 1, "b": 2, "c": 3}'])
def test_values_are_counted_before_they_are_parsed(text: str) -> None:
    assert parse_json(text, PATH, limits=JsonLimits(100, 3))
    with pytest.raises(CorruptCheckpoint, match="has about 3 values"):
        parse_json(text + "not JSON", PATH, limits=JsonLimits(100, 2))


def write_header(path: Path, num_tensors: int) -> None:
    item = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    names = [f"model.layers.{i // 512}.mlp.experts.{i % 512}.weight" for i in range(num_tensors)]
    tensors = {name: {**item, "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(tensors).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * num_tensors))


def test_a_header_of_90_megabytes_is_not_read(folder: Path) -> None:
    with (folder / WEIGHTS).open("wb") as file:
        file.write((90_000_000).to_bytes(8, "little"))
        file.truncate(100_000_000)
    refused(folder, "its header has 90000000 bytes, and a header has 33554432 at most")


def test_a_file_of_too_many_tensors_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "MOST_TENSORS", 6)
    write_header(folder / WEIGHTS, 7)
    refused(folder, "it lists 7 tensors, and a model has 6 at most.; download it again")


def test_files_of_too_many_tensors_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MOST_TENSORS", 6)
    (folder / WEIGHTS).unlink()
    for name in ("a.safetensors", "b.safetensors"):
        write_header(folder / name, 4)
    weight_map = dict(zip("xy", ("a.safetensors", "b.safetensors"), strict=True))
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, "hold more than the 6 tensors that a model has at most")


def test_an_index_of_too_many_tensors_or_files_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / WEIGHTS).unlink()
    weight_map = {f"tensor {i}": f"{i}.safetensors" for i in range(7)}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    for name in ("_MAX_FILES", "MOST_TENSORS"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, name, 6)
            refused(folder, "lists 7 tensors in 7 files, and a model has")


def test_a_mixture_of_20_000_tensors_passes(folder: Path) -> None:
    write_header(folder / WEIGHTS, 20_000)
    assert len(list_tensors(folder)) == 20_000


def described(**parts: Any) -> dict[str, Any]:
    return {"model": {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}, **parts}


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"id": 2, "content": content, "special": False, "normalized": False, **flags}


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"tokens": 1}, "it has 2 tokens in its vocabulary, and the limit is 1; use the tokenizer"),
        ({"merges": 0}, "it has 1 merges, and the limit is 0"),
        ({"added_tokens": 1}, "it has 2 added tokens"),
        ({"special_tokens": 0}, "it has 1 special tokens"),
        ({"steps": 1}, "it has 2 steps in its normalizer"),
        ({"growth": 1}, "its normalizer may make 2 characters of one, and the limit is 1"),
        ({"normalized": 7}, "it has 8 characters in normalized added tokens"),
        ({"searched": 3}, "searches 4 characters of added tokens for the regular expression"),
    ],
)
def test_each_limit_of_a_tokenizer_is_a_sentence(limits: dict[str, int], words: str) -> None:
    steps = [{"type": "NFC"}, replace("(a+)+", "x", "Regex")]
    whole = described(
        added_tokens=[token("aaa!", normalized=True), token("end", special=True)],
        normalizer={"type": "Sequence", "normalizers": steps},
    )
    require_limits(whole, PATH)
    with pytest.raises(CorruptCheckpoint, match=f"tokenizer.json: .*{words}"):
        require_limits(whole, PATH, TokenizerLimits(**limits))


def test_a_vocabulary_of_more_than_half_a_million_is_refused(folder: Path) -> None:
    vocab = ",".join([f'"{i}":{i}' for i in range(600_000)])
    (folder / PATH).write_text(f'{{"model": {{"vocab": {{{vocab}}}}}}}')
    refused(folder, "it has 600000 tokens in its vocabulary, and the limit is 524288")


def test_the_largest_tokenizers_in_use_pass() -> None:
    vocab = {str(i): i for i in range(262_144)}
    merges = [["a", "b"]] * 514_906
    added = [token(f"<unused{i}>", special=True) for i in range(6_415)]
    added += [token("<sound65535>", normalized=True)] * 65_536
    normalizer = replace(" ", "▁")
    model = {"vocab": vocab, "merges": merges}
    require_limits({"model": model, "added_tokens": added, "normalizer": normalizer}, PATH)
    pairs = [[str(i), -1.0] for i in range(256_000)]
    require_limits(described(model={"vocab": pairs}), PATH)


def replace(pattern: str, content: str, kind: str = "String") -> Step:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def charsmap(longest: int) -> Step:
    content = (4).to_bytes(4, "little") + bytes(4) + b"x" * longest + b"\0"
    written = base64.b64encode(content).decode()
    return {"type": "Precompiled", "precompiled_charsmap": written}


BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
BOMBS = {
    "doubled": [replace("a", "aa")] * 30,
    "in turn": [replace("a", "bb"), replace("b", "cc"), replace("c", "aa")] * 10,
    "by case": [replace("a", "AA"), {"type": "Lowercase"}] * 15,
    "by compatibility": [replace("a", "\ufdfa"), {"type": "NFKC"}, replace("\u0644", "a")] * 10,
    "by a pattern": [replace(".", "ab", "Regex")] * 30,
    "between characters": [replace("", "a", "Regex")] * 30,
    "by spaces": [BERT, replace(" ", "\u4e2d")] * 20,
    "by bytes": [{"type": "ByteLevel"}] * 30,
    "by beginnings": [{"type": "Prepend", "prepend": "a" * 1000}] * 2,
    "by a map": [charsmap(10_000)],
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_normalizer_that_grows_its_text_without_end_is_refused(name: str, folder: Path) -> None:
    steps = BOMBS[name]
    nested = {"type": "Sequence", "normalizers": steps[:1]}
    for step in steps[1:]:
        nested = {"type": "Sequence", "normalizers": [nested, step]}
    whole = json.loads((folder / PATH).read_text())
    whole["added_tokens"].append({**whole["added_tokens"][0], "content": "a", "normalized": True})
    for normalizer in ({"type": "Sequence", "normalizers": steps}, nested):
        written = json.dumps({**whole, "normalizer": normalizer})
        if normalizer is nested and len(steps) > 30:
            continue
        (folder / PATH).write_text(written)
        refused(folder, r"tokenizer\.json: its normalizer may make .* characters of one")


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")],
        [replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "Lowercase"}],
        [charsmap(18), {"type": "Strip"}, replace(" {2,}", "▁", "Regex")],
        [replace(old, new) for old, new in zip("…½¼¾№ﬁﬂ", ["...", "1/2"] * 4, strict=False)] * 4,
        [replace(rf"\s*{mark}\s*", f" {mark} ", "Regex") for mark in ".,;"],
        [BERT],
    ],
)
def test_normalizers_of_models_pass(steps: list[Step]) -> None:
    normalizer = {"type": "Sequence", "normalizers": steps}
    added = [token(f"<|{i}|>", normalized=True) for i in range(100)]
    require_limits(described(normalizer=normalizer, added_tokens=added), PATH)


CHARACTERS = st.text("abA \ufb01", max_size=3)
STEPS = st.one_of(
    st.builds(replace, CHARACTERS.filter(bool), CHARACTERS),
    st.builds(replace, st.sampled_from(["a|b", ".", "A+"]), CHARACTERS, st.just("Regex")),
    st.builds(lambda prepend: {"type": "Prepend", "prepend": prepend}, CHARACTERS),
    st.sampled_from([{"type": kind} for kind in ("Lowercase", "NFKC", "NFD", "ByteLevel")]),
)


@given(st.lists(STEPS, max_size=6), st.text("abA ", min_size=1, max_size=8))
def test_no_text_grows_beyond_the_bound(steps: list[Step], text: str) -> None:
    from tokenizers import Tokenizer as Backend

    normalizer = {"type": "Sequence", "normalizers": steps}
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    backend = Backend.from_str(
        json.dumps({"version": "1.0", "model": model, "added_tokens": [], "normalizer": normalizer})
    )
    try:
        grown = backend.normalizer.normalize_str(text)
    except BaseException as error:
        # the library panics at some steps after others
        assume(type(error).__module__ != "pyo3_runtime")
        raise
    # a pattern may match once more, at the end
    assert len(grown) <= _growth(steps) * (len(text) + 1)


def test_a_regular_expression_that_explodes_on_an_added_token_is_refused(folder: Path) -> None:
    def add(content: str) -> None:
        whole = json.loads((folder / PATH).read_text())
        whole["normalizer"] = replace("(a+)+$", "b", "Regex")
        sample = {**whole["added_tokens"][0], "normalized": True, "special": False}
        whole["added_tokens"].append({**sample, "content": content})
        (folder / PATH).write_text(json.dumps(whole))

    add("a" * 60 + "!")
    refused(folder, "tokenizer.json can't be read .*retry-limit")
    add("a!" * 1000)
    refused(folder, "searches 2061 characters of added tokens")
