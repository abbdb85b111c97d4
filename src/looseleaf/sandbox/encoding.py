"""Tokenizers: the ids of a text, the job that finds them in a process, and which need one.

A tokenizer's regexes may take exponential time, and its normalizer may multiply a text. Those
whose parts are all on a list of harmless ones run in the caller's process."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from looseleaf.errors import CorruptCheckpoint, InvalidRequest

LONG_TEXT = 2**13
"""Characters from which on other threads run while a text is encoded, which takes milliseconds."""

# no model's own patterns match more slowly than in time linear in the text
_LINEAR = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
    *("(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"),
    *(r" ?\p{L}+", r" ?\p{N}+", r" ?\p{N}", r"\p{N}{1,3}", r"\p{N}", r"\p{L}+", r"\p{N}+"),
    *(r" ?[^\s\p{L}\p{N}]+", r"\s+", r"\s", r"\d", r"[0-9]", r"\d+", r"[0-9]+", r"\d{1,3}"),
}
# linear where a later alternative takes the run of spaces that these give back
_BEFORE_SPACES = {r"\s+(?!\S)", r"\s*[\r\n]+", r"\s*[\r\n]"}
_NORMALIZERS = {
    *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "BertNormalizer"),
    *("ByteLevel", "Nmt", "Prepend"),
}
_PRE_TOKENIZERS = {
    *("ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"),
    *("BertPreTokenizer", "CharDelimiterSplit"),
}
_MOST_STEPS = 16
_LARGEST_GROWTH = 16
_LONGEST_PIECE = 512
_LONGEST_WORD = 1000


def make(setup: dict[str, Any]) -> Callable[[dict[str, Any]], list[Any]]:
    """The job of a tokenizer: the setup has its ``sources``, a request the number of one of them,
    whether ``markers_are_text``, the ``text``, and the ``form`` of the answer: ids or spans."""
    backends: dict[tuple[int, bool], Any] = {}

    def job(request: dict[str, Any]) -> list[Any]:
        key = request["source"], request["markers_are_text"]
        if key not in backends:
            backends[key] = load_backend(setup["sources"][key[0]], key[1])
        encode = spans_of if request["form"] == "spans" else ids_of
        encoded: list[Any] = encode(backends[key], request["text"])
        return encoded

    return job


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library has panicked: that is no Exception, and has no name to import."""
    return type(error).__module__ == "pyo3_runtime"


def load_backend(source: str, markers_are_text: bool) -> Any:
    """The tokenizer of a ``tokenizer.json``. Raises CorruptCheckpoint."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(source)
    except BaseException as error:
        # the library raises bare Exception for whatever it can't read, and for some of it a panic
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise CorruptCheckpoint(f"can't be read ({error}); download it again") from error
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = markers_are_text
    return backend


def spans_of(backend: Any, text: str) -> list[tuple[int, int, int]]:
    """Each id of ``text`` with the bounds of its characters."""
    encoding = backend.encode(text, add_special_tokens=False)
    pairs = zip(encoding.ids, encoding.offsets, strict=True)
    return [(token_id, start, end) for token_id, (start, end) in pairs]


def ids_of(backend: Any, text: str) -> list[int]:
    """The ids of ``text``. Raises InvalidRequest if the tokenizer can't read it."""
    try:
        if len(text) < LONG_TEXT:
            return list(backend.encode(text, add_special_tokens=False).ids)
        # the library holds the interpreter's lock while it encodes one text, but not for a batch
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)
    except BaseException as error:
        # bare Exception where a vocabulary has no token for what is unknown, a panic where a regex
        # gives up
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise InvalidRequest(
            f"the model's tokenizer can't read some of the text ({error}): leave it out, or use a "
            "tokenizer.json that has a token for what is unknown"
        ) from error


def is_linear(described: Mapping[str, Any]) -> bool:
    """Whether every part of a ``tokenizer.json`` takes time and room linear in the text."""
    try:
        normalizers = [*_steps(described.get("normalizer"), "normalizers")]
        splits = [*_steps(described.get("pre_tokenizer"), "pretokenizers")]
        return (
            len(normalizers) + len(splits) <= _MOST_STEPS
            and all(map(_is_linear_normalizer, normalizers))
            and math.prod(map(_growth, normalizers)) <= _LARGEST_GROWTH
            and all(map(_is_linear_split, splits))
            and _is_linear_model(described["model"])
        )
    except (AttributeError, KeyError, TypeError, RecursionError):
        # of another form than the library writes
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
    """How many times longer a step makes a text."""
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
    # bars inside of (?i:…) are no alternatives
    alternatives = re.split(r"\|(?![^(]*\))", regex)
    known = _LINEAR if alternatives[-1] != r"\s+" else _LINEAR | _BEFORE_SPACES
    return set(alternatives) <= known


def _is_linear_model(model: Mapping[str, Any]) -> bool:
    kind, vocabulary = model.get("type"), model["vocab"]
    if kind == "WordPiece":
        return int(model["max_input_chars_per_word"]) <= _LONGEST_WORD
    if kind == "Unigram":
        # at each character the pieces that begin there are tried
        return all(len(piece) <= _LONGEST_PIECE for piece, _ in vocabulary)
    return kind in ("BPE", "WordLevel")
