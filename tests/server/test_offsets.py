"""``text_offset`` says where in an output's text a token begins, whole or as a stream."""

from pathlib import Path
from typing import Any

import pytest

from looseleaf.models import Tokenizer
from looseleaf.server.names import REFERENCE_NAME
from looseleaf.server.report import TextOffsets
from tests.models.kinds import write_kind
from tests.server.live import Live

PATH = "/v1/completions"
BASE: dict[str, Any] = {
    "model": REFERENCE_NAME,
    "prompt": "The seal of Orlen Gate is",
    "max_tokens": 40,
    "temperature": 0,
    "logprobs": 1,
    "ignore_eos": True,
}


def columns(chunks: list[dict[str, Any]]) -> tuple[str, list[str], list[int]]:
    """The text of an only choice, its tokens and their offsets."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [token for entry in logprobs for token in entry["tokens"]]
    offsets = [offset for entry in logprobs for offset in entry["text_offset"]]
    return "".join(choice["text"] for choice in choices), tokens, offsets


def plain_text(live: Live) -> str:
    return columns([live.post(PATH, BASE).json()])[0]


def with_markers(live: Live) -> dict[str, Any]:
    """Tokens that have no text, between those that have."""
    special = sorted(live.service.llm.engine.tokenizer.special_token_ids)
    bias = {str(token): 5 for token in special[:8]}
    return {"temperature": 2, "seed": 3, "logit_bias": bias, "max_tokens": 80}


def parts_of_characters(live: Live) -> dict[str, Any]:
    """Tokens that are single bytes, of which some make a character together."""
    tokenizer = live.service.llm.engine.tokenizer
    parts = [n for n in range(tokenizer.vocab_size) if tokenizer.token_bytes(n)[:1] > b"\x7f"]
    bias = {str(token): 9 for token in parts[:400]}
    return {"temperature": 2, "seed": 3, "logit_bias": bias, "max_tokens": 80}


def held_back(live: Live) -> dict[str, Any]:
    """Text that waits until it is known not to be a stop string."""
    text = plain_text(live)
    return {"stop": [text[3:9] + "\x00", text[20:26]]}


@pytest.mark.parametrize("case", [dict, with_markers, parts_of_characters, held_back])
def test_offsets_are_where_the_text_of_each_token_begins(live: Live, case: Any) -> None:
    body = {**BASE, **(case() if case is dict else case(live))}
    whole = columns([live.post(PATH, body).json()])
    assert columns(live.events(PATH, {**body, "stream": True})) == whole
    text, tokens, offsets = whole
    assert offsets[0] == 0 and offsets == sorted(offsets)
    for token, begin, end in zip(tokens, offsets, [*offsets[1:], None], strict=True):
        if end is not None and begin < end <= len(text) and "\ufffd" not in token:
            # before it may be U+FFFD, for a character that the tokens before it did not finish
            assert text[begin:end].lstrip("\ufffd") == token
    if case in (with_markers, parts_of_characters):
        assert len(set(offsets)) < len(offsets), "the case is not met"


@pytest.mark.parametrize(("prompt", "second"), [("ab", 2), ("", 1)])
def test_offsets_count_the_first_space_behind_a_prompt_s_text(
    prompt: str, second: int, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(write_kind(tmp_path, "prepend"))
    token = tokenizer.token_id("\u2581a")
    assert token is not None
    offsets = TextOffsets(tokenizer, [1, *tokenizer.encode(prompt)])
    assert offsets.follow([token, token]) == [0, second]
