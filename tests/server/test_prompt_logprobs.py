"""Prompt log-probabilities over HTTP: vLLM's form, and the echo by which lm-eval scores choices."""

import math
from typing import Any

import pytest

from looseleaf.server.names import REFERENCE_NAME
from tests.server.live import DOCUMENT, QUESTION, Live

PROMPT = "Mira Tolland signs travel requests."


def complete(live: Live, **fields: Any) -> dict[str, Any]:
    body = {"model": REFERENCE_NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 1, **fields}
    answer = live.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def tokens_of(live: Live, text: str) -> list[int]:
    ids: list[int] = live.post("/tokenize", {"prompt": text}).json()["tokens"]
    return ids


def test_an_echo_scores_choices_as_lm_eval_reads_it(live: Live) -> None:
    """lm-eval sends token ids, one token of output, and reads columns between the two ends."""
    context = tokens_of(live, QUESTION)
    choices = [[*context, *tokens_of(live, text)[1:]] for text in (" Mira Tolland", " a whale")]
    answer = complete(live, prompt=choices, echo=True, logprobs=1)
    sums = []
    for choice, ids in zip(answer["choices"], choices, strict=True):
        columns = choice["logprobs"]
        assert len({len(column) for column in columns.values()}) == 1
        assert len(columns["tokens"]) == len(ids) + 1 and columns["token_logprobs"][0] is None
        logprobs = columns["token_logprobs"][len(context) : -1]
        tops = columns["top_logprobs"][len(context) : -1]
        assert all(value <= max(top.values()) for value, top in zip(logprobs, tops, strict=True))
        sums.append(sum(logprobs))
    again = complete(live, prompt=choices[0], echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert sum(again["token_logprobs"][len(context) : -1]) == pytest.approx(sums[0], abs=1e-3)


def test_an_echo_begins_the_text_streamed_or_not(live: Live) -> None:
    plain = complete(live, max_tokens=5)["choices"][0]["text"]
    whole = complete(live, max_tokens=5, echo=True)["choices"][0]
    assert whole["text"] == PROMPT + plain and whole["logprobs"] is None
    scored = complete(live, max_tokens=5, echo=True, logprobs=2)["choices"][0]
    offsets, tokens = scored["logprobs"]["text_offset"], scored["logprobs"]["tokens"]
    assert offsets == sorted(offsets) and offsets[-1] < len(scored["text"])
    assert scored["text"][offsets[2] :].lstrip().startswith(tokens[2].lstrip())
    body = {"model": REFERENCE_NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 5}
    events = live.events("/v1/completions", {**body, "stream": True, "echo": True, "logprobs": 2})
    pieces = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(piece["text"] for piece in pieces) == scored["text"]
    for name, column in scored["logprobs"].items():
        parts = [piece["logprobs"][name] for piece in pieces if piece["logprobs"]]
        joined = [value for part in parts for value in part]
        if name in ("tokens", "text_offset"):
            assert joined == column
        assert len(joined) == len(column)


def test_no_tokens_and_an_echo_are_the_prompt(live: Live) -> None:
    answer = complete(live, max_tokens=0, echo=True, logprobs=0)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_have_vllms_form_in_both_endpoints(live: Live) -> None:
    ids = tokens_of(live, PROMPT)
    (choice,) = complete(live, prompt=ids, prompt_logprobs=2)["choices"]
    scores = choice["prompt_logprobs"]
    assert scores[0] is None and len(scores) == len(ids)
    for token, entry in zip(ids[1:], scores[1:], strict=True):
        assert 2 <= len(entry) <= 3 and sorted(value["rank"] for value in entry.values())[0] == 1
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert math.isfinite(entry[str(token)]["logprob"])
    answer = live.chat(prompt_logprobs=0, max_tokens=0, documents=[{"text": DOCUMENT}]).json()
    scores = answer["prompt_logprobs"]
    assert len(scores) == answer["usage"]["prompt_tokens"]
    document = answer["looseleaf"]["documents"][0]
    stop = document["offset"] + document["tokens"]
    assert scores[stop - 1 : stop + 1] == [None, None] and scores[-1] is not None
    assert "prompt_logprobs" not in live.chat(max_tokens=1).json()
