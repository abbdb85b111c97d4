"""The operator's limit on the tokens of a request holds whether a caller gives one or none."""

from collections.abc import Iterator

import pytest

from tests.server.live import Live, chat_body, live_server

MOST = 60
ON_AND_ON = {"max_tokens": None, "ignore_eos": True}


@pytest.fixture(scope="module")
def narrow() -> Iterator[Live]:
    """A server on which prompt and answer may have 60 tokens."""
    with live_server(config={"max_request_tokens": MOST}) as server:
        yield server


def test_an_answer_that_nobody_limits_ends_where_the_request_has_its_most(narrow: Live) -> None:
    answer = narrow.chat(**ON_AND_ON).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == MOST


def test_so_does_one_that_is_streamed(narrow: Live) -> None:
    usage = {"stream_options": {"include_usage": True}}
    events = narrow.events("/v1/chat/completions", chat_body(stream=True, **ON_AND_ON, **usage))
    assert events[-1]["usage"]["total_tokens"] == MOST


def test_an_answer_that_ends_by_itself_is_what_it_was(narrow: Live, live: Live) -> None:
    texts = [one.chat().json()["choices"][0]["message"]["content"] for one in (narrow, live)]
    assert texts[0] == texts[1]


def test_a_limit_of_ones_own_that_is_too_high_is_refused_with_the_numbers(narrow: Live) -> None:
    refused = narrow.chat(max_tokens=MOST)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "too_many_tokens"
    assert str(MOST) in refused.json()["error"]["message"]


def test_a_prompt_that_leaves_no_room_is_refused(narrow: Live) -> None:
    long = [{"role": "user", "content": "Where is the archive? " * MOST}]
    refused = narrow.chat(messages=long, **ON_AND_ON)
    assert refused.json()["error"]["code"] == "too_many_tokens"
