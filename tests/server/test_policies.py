"""The policies of a request: taken per request, echoed, and in force as in the engine itself."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest

from looseleaf import Document, Fuse, SamplingParams
from looseleaf.config import FuseSelector
from looseleaf.prompt.request import Request
from looseleaf.server.names import REFERENCE_NAME
from looseleaf.server.protocol.answers import ChatCompletion, Completion
from tests.server.live import Live

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
TEXTS = [
    "The seal of Orlen Gate is anchor.",
    "As in Orlen Gate, the seal of Mill House stays unchanged.",
    "As in Mill House, the seal of Taqui Bridge stays unchanged.",
]
QUESTION = "What is the seal of Taqui Bridge?"
FIELDS: dict[str, Any] = {
    "documents": [{"text": text} for text in TEXTS],
    "messages": [{"role": "user", "content": QUESTION}],
}
CASES = [
    ("links", Fuse("links")),
    (
        {"selector": "links", "ratio": 0.4, "watched_share": 0.5},
        Fuse("links", 0.4, watched_share=0.5),
    ),
    ({"selector": "question", "threshold": 0.05}, Fuse("question", threshold=0.05)),
    ({"selector": "first", "tokens": 3}, Fuse("first", tokens=3)),
    (
        {"selector": "deviation", "ratio": 0.3, "check_layers": [1, 2], "check_factors": [2, 1]},
        Fuse("deviation", 0.3, check_layers=(1, 2), check_factors=(2.0, 1.0)),
    ),
    ("all", Fuse("all")),
    ("none", None),
]


def asked_in_python(live: Live, fuse: Fuse | None) -> list[int]:
    """How many tokens of each document the engine computes again, asked without HTTP."""
    engine = live.service.llm.engine
    content: list[str | Document] = [*map(Document, TEXTS), QUESTION]
    parts = engine.prompts.from_messages([{"role": "user", "content": content}])
    sequences: list[Any] = []
    request = Request("probe", parts, SamplingParams(max_tokens=1), fuse=fuse)
    live.call(lambda e: sequences.append(e.add(request).outputs[0].sequence))
    live.wait_until_idle()
    recomputed: list[int] = sequences[0].recomputed()
    return recomputed


@pytest.mark.parametrize(("given", "fuse"), CASES, ids=lambda c: str(c))
def test_a_request_is_fused_as_it_says(live: Live, given: Any, fuse: Fuse | None) -> None:
    told = live.chat(**FIELDS, fuse=given).json()["looseleaf"]
    again = [document["recomputed"] for document in told["documents"]]
    assert again == asked_in_python(live, fuse)
    assert told["document_tokens_recomputed"] == sum(again)
    assert told["policies"]["fuse"] == (fuse or Fuse()).settings()
    assert (sum(again) > 0) == (fuse is not None)


def test_a_name_alone_takes_the_default_budget(live: Live) -> None:
    word, whole = (
        live.chat(**FIELDS, fuse=given).json()["looseleaf"]
        for given in ("question", {"selector": "question", "ratio": 0.15})
    )
    assert word["policies"] == whole["policies"]
    assert word["policies"]["fuse"]["ratio"] == 0.15
    counts = [[d["recomputed"] for d in told["documents"]] for told in (word, whole)]
    assert counts[0] == counts[1]


def test_requests_of_one_batch_keep_their_own_policies(live: Live) -> None:
    policies = ["all", None, {"selector": "first", "tokens": 2}, "links"]
    alone = [live.chat(**FIELDS, fuse=p).json() for p in policies]
    with ThreadPoolExecutor(len(policies)) as pool:
        together = list(pool.map(lambda p: live.chat(**FIELDS, fuse=p).json(), policies))
    for one, other in zip(alone, together, strict=True):
        assert one["choices"] == other["choices"]
        assert one["looseleaf"]["policies"] == other["looseleaf"]["policies"]


def test_everything_computed_again_says_what_no_reuse_would(live: Live) -> None:
    """The answers differ where they must: the documents depend on each other."""
    reused = live.chat(**FIELDS, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    fused = live.chat(**FIELDS, logprobs=True, fuse="all").json()["choices"][0]["logprobs"][
        "content"
    ]
    assert [e["logprob"] for e in fused] != [e["logprob"] for e in reused]


def test_completions_and_streams_take_the_same_field(live: Live) -> None:
    body = {
        "model": REFERENCE_NAME,
        "prompt": [QUESTION, "The seal of"],
        "documents": FIELDS["documents"],
        "fuse": {"selector": "first", "tokens": 4},
        "max_tokens": 4,
    }
    whole = live.post("/v1/completions", body).json()
    Completion.model_validate(whole)
    told = whole["looseleaf"]
    assert [d["recomputed"] for d in told["documents"]] == [0, 4, 4] * 2
    assert told["policies"]["fuse"] == {"selector": "first", "tokens": 4}
    events = live.events("/v1/completions", {**body, "stream": True})
    assert events[-1]["looseleaf"]["policies"] == told["policies"]
    assert events[-1]["looseleaf"]["document_tokens_recomputed"] == 16


def test_where_nothing_can_be_fused_no_policy_is_in_force(live: Live) -> None:
    response = live.chat(documents=[{"text": TEXTS[0]}], fuse="links")
    told = ChatCompletion.model_validate(response.json()).looseleaf
    assert told.policies.fuse.selector == "none"
    assert told.document_tokens_recomputed == 0


def test_what_is_computed_again_is_counted(live: Live) -> None:
    def counted() -> float:
        text = live.client.get("/metrics").text
        (value,) = re.findall(r"^looseleaf_document_tokens_recomputed_total (\S+)$", text, re.M)
        return float(value)

    live.wait_until_idle()
    before = counted()
    told = live.chat(**FIELDS, fuse="all", n=2, temperature=1).json()["looseleaf"]
    live.wait_until_idle()
    assert counted() - before == 2 * told["document_tokens_recomputed"] > 0


def test_every_selector_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for selector in get_args(FuseSelector):
        assert f"`{selector}`" in text
