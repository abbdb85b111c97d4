"""Whatever a tokenizer, its settings and its templates say, they load or are refused by name."""

import json
import tracemalloc
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.errors import InvalidOption, InvalidRequest, ModelError
from looseleaf.models import Tokenizer
from looseleaf.models.tokenizer.chat_template import ChatTemplate
from tests.models.hostile import NO_OBJECTS, SETTINGS, WEIGHTS, put, refused, rewrite_header, use


@pytest.mark.parametrize(
    "written", ['""', '"no place"', '"{text}{text}"', '"{text"', "5", "[]", "true"]
)
def test_a_document_template_without_one_place_is_refused(folder: Path, written: str) -> None:
    put(folder, SETTINGS, "document_template", written)
    refused(folder, rf"{SETTINGS}: document_template must")


@pytest.mark.parametrize(
    "written",
    [
        *("5", "true", '{"default": "x"}', "[1]", '["x"]', "[null]", "[{}]", "[[]]"),
        *('[{"name": "default"}]', '[{"name": [], "template": "x"}]'),
        '[{"name": "a", "template": 1}]',
    ],
)
def test_a_chat_template_of_another_form_is_refused(folder: Path, written: str) -> None:
    put(folder, SETTINGS, "chat_template", written)
    refused(folder, rf"{SETTINGS}: chat_template must be a string, or a list")


@pytest.mark.parametrize(
    "source",
    [
        *("{% break %}", "{% macro f(a, a) %}{% endmacro %}", "{{ f(a=1, a=2) }}"),
        *("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ 1" + "+1" * 20_000 + " }}"),
        *("{{ " + "9" * 5000 + " }}", "{% for a in b %}" * 30 + "{% endfor %}" * 30),
    ],
)
def test_a_template_that_python_can_not_compile_is_refused(folder: Path, source: str) -> None:
    put(folder, SETTINGS, "chat_template", json.dumps(source))
    refused(folder, r"the chat template is not valid Jinja .*; fix it in")


@pytest.mark.parametrize("source", ["{{ 'x' * 100_000_000 }}", "{{ 'x' | center(100_000_000) }}"])
def test_nothing_of_a_template_is_computed_while_it_loads(source: str) -> None:
    tracemalloc.start()
    try:
        ChatTemplate(source)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_a_template_of_megabytes_is_refused(folder: Path) -> None:
    put(folder, SETTINGS, "chat_template", json.dumps("{{a}}" * 200_000))
    refused(folder, "the chat template has 1000000 characters")


@pytest.mark.parametrize("written", ["[1]", '"x"', "5", '{"1": {"content": 5}}'])
def test_added_tokens_of_another_form_are_refused(folder: Path, written: str) -> None:
    put(folder, SETTINGS, "added_tokens_decoder", written)
    refused(folder, SETTINGS)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("written", ["-1", "true", "1.5", str(2**63), "[[]]", '"x"', "Infinity"])
def test_end_tokens_that_are_no_ids_are_refused(folder: Path, name: str, written: str) -> None:
    (folder / "generation_config.json").unlink()
    put(folder, name, "eos_token_id", written)
    refused(folder, f"{name}: eos_token_id must be")


@pytest.mark.parametrize("content", NO_OBJECTS)
def test_a_tokenizer_that_is_no_object_is_named(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content, encoding="latin-1")
    refused(folder, r"tokenizer\.json")


@pytest.mark.parametrize("kept", [1, 100, 5000, -1])
def test_a_truncated_tokenizer_is_named(folder: Path, kept: int) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:kept])
    refused(folder, r"tokenizer\.json can't be read .*; download it again")


@pytest.mark.parametrize(
    ("part", "written", "words"),
    [
        ("normalizer", '{"type": "Precompiled", "precompiled_charsmap": "AAAA"}', "can't be read"),
        ("decoder", '["x"]', "decoder does not say of which type"),
        ("decoder", '{"type": "CTC", "pad_token": "x", "word_delimiter_token": "y", '
         '"cleanup": true}', "decoder step 'CTC' is not implemented"),
    ],
)  # fmt: skip
def test_a_part_that_no_tokenizer_has_is_named(
    folder: Path, part: str, written: str, words: str
) -> None:
    put(folder, "tokenizer.json", part, written)
    refused(folder, words)


def test_a_marker_of_a_million_characters_is_refused(folder: Path) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["added_tokens"][2]["content"] = "x" * 1_000_000
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    refused(folder, "a special token of 1000000 characters")


def test_text_that_the_vocabulary_has_nothing_for_is_the_requests_error(folder: Path) -> None:
    model = '{"type": "WordLevel", "unk_token": "?", "vocab": {"a": 0}}'
    put(folder, "tokenizer.json", "model", model)
    with pytest.raises(InvalidRequest, match="the model's tokenizer can't read a part of the text"):
        Tokenizer(folder).encode("who?")


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**4000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@given(st.data())
def test_any_value_in_any_place_loads_or_is_refused(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["config.json", SETTINGS, "tokenizer.json", WEIGHTS]))
    with TemporaryDirectory() as place:
        folder = Path(copytree(pristine, Path(place) / "copy"))

        def change(inner: Any) -> None:
            while isinstance(inner, dict) and inner:
                key = data.draw(st.sampled_from(sorted(inner)))
                if not isinstance(inner[key], dict) or data.draw(st.booleans()):
                    inner[key] = data.draw(HOSTILE)
                    return
                inner = inner[key]

        if name == WEIGHTS:
            rewrite_header(folder, change)
        else:
            whole = json.loads((folder / name).read_text())
            change(whole)
            (folder / name).write_text(json.dumps(whole))
        try:
            use(folder)
        except ModelError as error:
            assert str(folder) in str(error)
        except InvalidOption as error:
            assert "give max_model_len" in str(error)
