"""SentencePiece tokenizers in the spellings of the field: spaces in front, whole streams."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from looseleaf.models import Tokenizer
from looseleaf.models.tokenizer.chat_template import ChatTemplate


def write_sentencepiece(folder: Path, style: str) -> Path:
    """A SentencePiece-style tokenizer with byte fallback, in one of the spellings in the field."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "▁▁", "▁▁a"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b"), ("▁", "▁"), ("▁▁", "a")]
    backend = Backend(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    start = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "prepend":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence([*start, decoders.Strip(" ", 1, 0)])
    elif style == "plain":
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence(start)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session", params=["prepend", "plain", "metaspace"])
def sentencepiece(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Backend]:
    folder = write_sentencepiece(tmp_path_factory.mktemp(request.param), request.param)
    return Tokenizer(folder), Backend.from_file(str(folder / "tokenizer.json"))


@given(text=st.text(st.sampled_from("ab é😀z"), max_size=12))
def test_a_sentencepiece_stream_equals_the_library_s_whole_decode(
    text: str, sentencepiece: tuple[Tokenizer, Backend]
) -> None:
    tokenizer, backend = sentencepiece
    if isinstance(backend.decoder, decoders.Metaspace):
        # that decoder knows no bytes, so only pieces of the vocabulary come back
        text = "".join(character for character in text if character in "ab é")
    ids = [1, *tokenizer.encode(text), 2]
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids) == backend.decode(ids)


@given(ids=st.lists(st.integers(259, 268), max_size=12))
def test_sentencepiece_spaces_are_the_library_s(
    ids: list[int], sentencepiece: tuple[Tokenizer, Backend]
) -> None:
    tokenizer, backend = sentencepiece
    assert tokenizer.decode(ids) == backend.decode(ids)


@given(ids=st.lists(st.integers(0, 268), max_size=20))
def test_a_sentencepiece_stream_equals_its_whole_decode_for_any_bytes(
    ids: list[int], sentencepiece: tuple[Tokenizer, Backend]
) -> None:
    tokenizer, _ = sentencepiece
    stream = tokenizer.stream()
    assert "".join([stream.push(i) for i in ids]) + stream.finish() == tokenizer.decode(ids)


SPACED = "<s>ab{% for m in messages %}<s>{{ m.content }}</s>ab\n{% endfor %} b"


@pytest.fixture(scope="session")
def spaced(sentencepiece: tuple[Tokenizer, Backend]) -> tuple[Tokenizer, Backend]:
    """The tokenizers with a chat template, which writes text before and behind markers."""
    tokenizer, backend = sentencepiece
    tokenizer._chat_templates["default"] = ChatTemplate(SPACED)
    return tokenizer, backend


@given(text=st.text(st.sampled_from("ab é"), max_size=6))
def test_a_marker_in_a_user_s_text_changes_no_token_around_it(
    text: str, spaced: tuple[Tokenizer, Backend]
) -> None:
    tokenizer, backend = spaced
    (ids,) = tokenizer.encode_chat([{"role": "user", "content": text}])
    whole = f"<s>ab<s>{text}</s>ab\n b"
    assert ids == backend.encode(whole, add_special_tokens=False).ids
    (marked,) = tokenizer.encode_chat([{"role": "user", "content": text + "</s>"}])
    before, after = ids.index(1, 1) + 1, len(ids) - ids.index(2)
    assert marked[:before] == ids[:before]
    assert marked[-after:] == ids[-after:]


def test_a_text_begins_with_the_space_of_its_tokenizer(
    sentencepiece: tuple[Tokenizer, Backend],
) -> None:
    tokenizer, backend = sentencepiece
    for text in ("ab", " ab", "ab</s>"):
        ids = tokenizer.encode(text + tokenizer.protect("</s>"), special=True)
        expected = backend.encode(text, add_special_tokens=False).ids
        assert ids[: len(expected)] == expected
