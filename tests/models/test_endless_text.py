"""Templates and tokenizers that would not end, or would fill the memory, end with a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from looseleaf.errors import InvalidRequest, LimitExceeded
from looseleaf.models import Tokenizer
from looseleaf.models.tokenizer import chat_template, guarded_backend
from looseleaf.sandbox import Limits
from tests.models.hostile import SETTINGS, put

MESSAGES = [{"role": "user", "content": "aaaa"}]
DOUBLED = "{% set s = s ~ s %}" * 30
TEMPLATES = {
    "three-loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "a-text-doubled": "{% set s = messages[0].content %}" + DOUBLED + "{{ s }}",
    "doubled-in-a-loop": "{% set n = namespace(s='x') %}{% for i in range(40) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "a-wide-number": "{{ '%2000000000d' % 1 }}",
    "a-list-times": "{{ [1] * 10 ** 10 }}",
    "words": "{{ lipsum(n=10 ** 7) }}",
    "doubled-escapes": "{{ '\\\\' " + "| tojson " * 40 + "}}",
}
TOO_MUCH = r"this model's chat template took more than .*: shorten the conversation, or mend"


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_LIMITS", Limits(seconds=0.3, mib=128, output=1 << 22))
    monkeypatch.setattr(guarded_backend, "_SECONDS", 0.3)
    monkeypatch.setattr(guarded_backend, "_SECONDS_PER_CHARACTER", 0.0)
    monkeypatch.setattr(guarded_backend, "_MIB", 128)


def close(tokenizer: Tokenizer) -> None:
    for sandbox in tokenizer.sandboxes:
        sandbox.close()


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_template_that_takes_too_much_is_ended_and_named(folder: Path, source: str) -> None:
    put(folder, SETTINGS, "chat_template", json.dumps(source))
    tokenizer = Tokenizer(folder)
    with pytest.raises(LimitExceeded, match=TOO_MUCH) as caught:
        tokenizer.encode_chat(MESSAGES)
    assert caught.value.what == "template"
    close(tokenizer)


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def replace(old: dict[str, str], new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": old, "content": new}


TOKENIZERS = {
    "nested-repeats": ("pre_tokenizer", split("(a+)+$"), "a" * 64 + "!"),
    "repeats-side-by-side": ("pre_tokenizer", split("a*a*a*a*a*a*$"), "a" * 300 + "!"),
    "a-long-run": ("pre_tokenizer", split("a+$"), "a" * 60_000 + "!"),
    "a-replaced-pattern": ("normalizer", replace({"Regex": "(a+)+$"}, ""), "a" * 64 + "!"),
}


@pytest.mark.parametrize(("stage", "part", "text"), TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_a_tokenizer_that_takes_too_much_is_ended_and_named(
    folder: Path, stage: str, part: dict[str, Any], text: str
) -> None:
    put(folder, "tokenizer.json", stage, json.dumps(part))
    tokenizer = Tokenizer(folder)
    assert not tokenizer.is_bounded
    with pytest.raises(InvalidRequest, match=r"th(e|is) model's tokenizer (can't|took)") as caught:
        tokenizer.encode(text)
    # a library that gives up by itself says so, and needs no limit
    assert "retry-limit" in str(caught.value) or isinstance(caught.value, LimitExceeded)
    # what is harmless is read as before
    assert tokenizer.encode("b")
    close(tokenizer)


def test_a_tokenizer_in_a_process_gives_the_same_tokens(folder: Path) -> None:
    text = "Who?  \n\n 12345 ﬁ \U0001f600 <|end|> " * 300
    here = Tokenizer(folder)
    assert here.is_bounded
    put(folder, "tokenizer.json", "normalizer", json.dumps(replace({"Regex": "^never$"}, "")))
    there = Tokenizer(folder)
    assert not there.is_bounded
    for piece in (text, text[:500], ""):
        assert there.encode(piece) == here.encode(piece)
        assert there.encode(piece, special=True) == here.encode(piece, special=True)
    assert there.encode_chat(MESSAGES) == here.encode_chat(MESSAGES)
    close(there)
