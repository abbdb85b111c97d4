"""Tokenizer backends: encoding, its sandbox job, and the test for linear tokenizers.

A tokenizer's regexes may take exponential time, and its normalizer may multiply a text. A
tokenizer of known linear parts runs in the caller's process, any other in a child process."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from looseleaf.errors import CorruptCheckpoint, InvalidRequest

LONG_TEXT = 2**13
"""Characters above which encoding releases the interpreter lock."""

# regex alternatives with linear matching time
_LINEAR = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
    *("(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"),
    *(r" ?\p{L}+", r" ?\p{N}+", r" ?\p{N}", r"\p{N}{1,3}", r"\p{N}", r"\p{L}+", r"\p{N}+"),
    *(r" ?[^\s\p{L}\p{N}]+", r"\s+", r"\s", r"\d", r"[0-9]", r"\d+", r"[0-9]+", r"\d{1,3}"),
}
# linear if a later alternative matches the spaces that these backtrack over
_BEFORE_SPACES = {r"\s+(?!\S)", r"\s*[\r\n]+", r"\s*[\r\n]"}
_NORMALIZERS = {
    *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "BertNormalizer"),
    *("ByteLevel", "Nmt", "Prepend"),
}
_PRE_TOKENIZERS = {
    *("ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"),
    *("BertPreTokenizer", "CharDelimiterSplit"),
}
_MAX_STEPS = 16
_MAX_GROWTH = 16
_MAX_PIECE = 512
_MAX_WORD = 1000


def make(setup: dict[str, Any]) -> Callable[[dict[str, Any]], list[Any]]:
    """The job of a tokenizer. ``setup`` has its JSON ``sources``.

    A request has ``source`` (an index), ``markers_are_text``, ``text``, and ``form``: ids or spans.
    """
    backends: dict[tuple[int, bool], Any] = {}
    forms: dict[str, Callable[[Any, str], list[Any]]] = {"ids": ids_of, "spans": spans_of}

    def job(request: dict[str, Any]) -> list[Any]:
        key = request["source"], request["markers_are_text"]
        if key not in backends:
            backends[key] = load_backend(setup["sources"][key[0]], key[1])
        return forms[request["form"]](backends[key], request["text"])

    return job


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a Rust library, whose class can't be imported."""
    return type(error).__module__ == "pyo3_runtime"


def load_backend(source: str, markers_are_text: bool) -> Any:
    """The tokenizer of a ``tokenizer.json``. Raises CorruptCheckpoint."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(source)
    except BaseException as error:
        # the library raises a bare Exception or a panic for invalid files
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise CorruptCheckpoint(f"can't be read ({error}); download it again") from error
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = markers_are_text
    return backend


def spans_of(backend: Any, text: str) -> list[tuple[int, int, int]]:
    """Token ids of ``text`` with their start and end in characters."""
    encoding = backend.encode(text, add_special_tokens=False)
    pairs = zip(encoding.ids, encoding.offsets, strict=True)
    return [(token_id, start, end) for token_id, (start, end) in pairs]


def ids_of(backend: Any, text: str) -> list[int]:
    """Token ids of ``text``. Raises InvalidRequest if the tokenizer fails on it."""
    try:
        if len(text) < LONG_TEXT:
            return list(backend.encode(text, add_special_tokens=False).ids)
        # only the batch call releases the interpreter lock
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)
    except BaseException as error:
        # a bare Exception for a missing unknown token, a panic for a regex that backtracks too far
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise InvalidRequest(
            f"the model's tokenizer can't read a part of the text ({error}): leave it out, or use "
            "a tokenizer.json with an unknown token"
        ) from error


def is_linear(described: Mapping[str, Any]) -> bool:
    """Whether all parts of a ``tokenizer.json`` take time and memory linear in the text."""
    try:
        normalizers = [*_steps(described.get("normalizer"), "normalizers")]
        splits = [*_steps(described.get("pre_tokenizer"), "pretokenizers")]
        return (
            len(normalizers) + len(splits) <= _MAX_STEPS
            and all(map(_is_linear_normalizer, normalizers))
            and math.prod(map(_growth, normalizers)) <= _MAX_GROWTH
            and all(map(_is_linear_split, splits))
            and _is_linear_model(described["model"])
        )
    except (AttributeError, KeyError, TypeError, RecursionError):
        # the library does not write this form
        return False


def _steps(stage: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    if stage is None:
        return
    if stage["type"] != "Sequence":
        yield stage
        return
    for step in stage[inner]:
        yield from _steps(step, inner)


def _is_linear_normalizer(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        return bool(step["pattern"].get("String"))
    return step["type"] in _NORMALIZERS


def _growth(step: Mapping[str, Any]) -> float:
    """The largest factor by which a step lengthens a text."""
    if step["type"] == "Prepend":
        return 1 + len(step["prepend"])
    if step["type"] == "Replace":
        return max(1.0, len(step["content"]) / len(step["pattern"]["String"]))
    return 1


def _is_linear_split(step: Mapping[str, Any]) -> bool:
    if step["type"] != "Split":
        return step["type"] in _PRE_TOKENIZERS
    pattern = step["pattern"]
    return bool(pattern["String"]) if "String" in pattern else _is_linear_regex(pattern["Regex"])


def _is_linear_regex(regex: str) -> bool:
    # bars inside (?i:…) do not separate alternatives
    alternatives = re.split(r"\|(?![^(]*\))", regex)
    known = _LINEAR if alternatives[-1] != r"\s+" else _LINEAR | _BEFORE_SPACES
    return set(alternatives) <= known


def _is_linear_model(model: Mapping[str, Any]) -> bool:
    kind, vocabulary = model.get("type"), model["vocab"]
    if kind == "WordPiece":
        return int(model["max_input_chars_per_word"]) <= _MAX_WORD
    if kind == "Unigram":
        # the model tries every piece at every character
        return all(len(piece) <= _MAX_PIECE for piece, _ in vocabulary)
    return kind in ("BPE", "WordLevel")
