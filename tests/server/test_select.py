"""A request may say what its tokens read, and is told what they did read."""

from typing import Any

import pytest

from looseleaf.config import EVICTING
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


@pytest.mark.parametrize(
    "asked", [3, {"window": 3, "adaptive": True}, {"window": 3, "local": "stale"}]
)
def test_a_request_has_its_last_tokens_revised(live: Live, asked: object) -> None:
    select = {"policy": "quest", "tokens": 64, "dense_layers": [0], "dense_below": 0}
    fields = {"messages": QUESTION, "documents": LONG, "select": select, "max_tokens": 20}
    answer = live.chat(**fields, revise=asked, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    report = answer.json()["looseleaf"]
    given = asked if isinstance(asked, dict) else {"window": asked}
    in_force = {"window": 3, "adaptive": False, "local": "exact", **given}
    assert report["policies"]["revise"] == in_force
    exposure = report["revision"]["exposure"]
    assert len(exposure) == 8 and exposure[0] == 1 and exposure == sorted(exposure)
    assert exposure[-1] > 1


def test_a_window_of_one_token_is_none(live: Live) -> None:
    for select in ("quest", None):
        report = live.chat(messages=QUESTION, select=select, revise=1).json()["looseleaf"]
        assert report["policies"]["revise"] == 1 and report["revision"] is None


@pytest.mark.parametrize("policy", EVICTING)
def test_a_request_may_have_keys_thrown_away(live: Live, policy: str) -> None:
    text = [{"role": "user", "content": LONG[0]["text"] + QUESTION[0]["content"]}]
    answer = live.chat(messages=text, select={"policy": policy, "tokens": 48}, max_tokens=8)
    assert answer.status_code == 200, answer.text
    assert answer.json()["looseleaf"]["policies"]["select"] == {"policy": policy, "tokens": 48}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"select": "h2o", "documents": LONG}, "documents are read by others"),
        ({"select": "snapkv", "revise": 4}, "leave revise out"),
        ({"select": {"policy": "tova", "mass": 0.9}}, "give select.tokens or select.ratio"),
        ({"select": {"policy": "tova", "sink": 9}}, "does not use select.sink"),
        ({"select": {"policy": "window", "mass": 0.9}}, "does not estimate a select.mass"),
        ({"select": {"policy": "all", "tokens": 9}}, "reads everything"),
        ({"revise": 4}, "add select"),
        ({"select": "all", "revise": 4}, "add select"),
        ({"select": "window", "revise": 4}, "policy 'window' chooses none"),
        ({"select": "retrieval", "documents": LONG}, "none of this request's documents is hosted"),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_reason(
    live: Live, asked: dict[str, Any], reason: str
) -> None:
    answer = live.chat(messages=QUESTION, **asked)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
