"""A request may say what its tokens read, and is told what they did read."""

import pytest

from tests.server.live import Live

LONG = [{"title": "notes", "text": "The seal of Orlen Gate is anchor. " * 40}]
QUESTION = [{"role": "user", "content": "What is the seal of Orlen Gate?"}]


@pytest.mark.parametrize(
    "asked",
    [
        "window",
        {"policy": "quest", "tokens": 64, "recall_every": 1},
        {"policy": "quest", "tokens": 64, "layer_budgets": "pyramid"},
    ],
)
def test_a_request_chooses_what_its_tokens_read(live: Live, asked: object) -> None:
    budget = asked if isinstance(asked, dict) else {"policy": asked, "tokens": 64}
    select = {"dense_layers": [0], **budget}
    answer = live.chat(messages=QUESTION, documents=LONG, select=select, max_tokens=8)
    assert answer.status_code == 200, answer.text
    report = answer.json()["looseleaf"]
    in_force = report["policies"]["select"]
    assert in_force["policy"] == select["policy"] and in_force["tokens"] == 64
    assert in_force["layer_budgets"] == select.get("layer_budgets", "flat")
    selection = report["selection"]
    assert selection["chosen_steps"] > 0
    assert 0 < selection["pages_read"] < selection["pages_held"]
    assert (selection["recall"] is not None) == ("recall_every" in select)


def test_without_a_policy_everything_is_read(live: Live) -> None:
    report = live.chat(messages=QUESTION, documents=LONG, max_tokens=4).json()["looseleaf"]
    assert report["policies"]["select"] == {"policy": "all"} and report["selection"] is None
