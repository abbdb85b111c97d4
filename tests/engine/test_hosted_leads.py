"""A hosted document is found behind the beginning that it was hosted behind; another is told so."""

import pytest

from looseleaf import Document, Select
from looseleaf.config import IndexConfig
from looseleaf.errors import InvalidRequest
from tests.engine.harness import GREEDY, Folder, make_llm, words

INDEX = IndexConfig("flat", sink=4, local=12)
FEW = Select("retrieval", tokens=40)


def test_what_is_hosted_behind_the_lead_of_a_chat_is_asked_for_by_chat(checkpoint: Folder) -> None:
    llm, report = make_llm(checkpoint(), num_pages=64), Document(words(3, 150))
    llm.host(report, index=INDEX)
    with pytest.raises(InvalidRequest, match=r"llm\.chat; or host Document\(text, context='alone'"):
        llm.generate([[report, "who?"]], GREEDY, select=FEW)
    (answer,) = llm.chat([{"role": "user", "content": [report, "who?"]}], GREEDY, select=FEW)
    assert answer.reuse.documents[0].hosted


def test_one_that_is_hosted_alone_is_asked_for_by_both(checkpoint: Folder) -> None:
    llm, report = make_llm(checkpoint(), num_pages=64), Document(words(3, 150), context="alone")
    llm.host(report, index=INDEX)
    (answer,) = llm.generate([[report, "who?"]], GREEDY, select=FEW)
    (other,) = llm.chat([{"role": "user", "content": [report, "who?"]}], GREEDY, select=FEW)
    assert answer.reuse.documents[0].hosted and other.reuse.documents[0].hosted


def test_what_hosting_returns_is_shown_in_a_line(checkpoint: Folder) -> None:
    segment = make_llm(checkpoint(), num_pages=64).host(Document(words(3, 150)), index=INDEX)
    told = repr(segment)
    assert told.startswith(f"HostedSegment({segment.num_tokens} tokens, a flat index, ")
    assert len(told) < 100
