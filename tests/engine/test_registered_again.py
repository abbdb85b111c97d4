"""A registration that failed keeps nobody from its id."""

from typing import Any

import pytest

from looseleaf import LLM, Document
from looseleaf.config import IndexConfig
from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.errors import DocumentExists, EngineFault, TooManyDocuments
from tests.engine.harness import Folder, assert_idle, document, make_llm

A, B = document(1, 40), document(2, 40)
FLAT = IndexConfig("flat", sink=4, local=12)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def register(llm: LLM, text: Document, hosted: IndexConfig | None) -> DocumentInfo:
    """Register a text as ``doc`` and wait, as an `AsyncLLM` does."""
    documents = llm.engine.documents
    documents.register(text, llm.engine.prompts.from_document(text), "doc", hosted=hosted)
    while (info := documents.stat("doc")).state == "computing":
        llm.engine.step()
    error = documents.failure("doc")
    if error is not None:
        raise error
    return info


def fail(llm: LLM, patch: pytest.MonkeyPatch, hosted: IndexConfig | None) -> None:
    with patch.context() as planted:
        planted.setattr("looseleaf.engine.documents.hosting.build_segment", broken)
        planted.setattr(llm.engine.runner, "run", broken)
        with pytest.raises(EngineFault):
            register(llm, A, hosted)


@pytest.fixture
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint())


@pytest.mark.parametrize("hosted", [None, FLAT], ids=["pool", "hosted"])
@pytest.mark.parametrize("then", [None, FLAT], ids=["then pool", "then hosted"])
@pytest.mark.parametrize("text", [A, B], ids=["the same", "another"])
def test_after_a_registration_failed_any_text_can_be_registered_under_its_id(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    hosted: IndexConfig | None,
    then: IndexConfig | None,
    text: Document,
) -> None:
    fail(llm, monkeypatch, hosted)
    info = register(llm, text, then)
    assert (info.state, info.hosted) == ("ready", then is not None)
    assert [info.id for info in llm.engine.documents.all()] == ["doc"]
    assert llm.engine.documents.get("doc").text == text.text
    with pytest.raises(DocumentExists):
        register(llm, A if text is B else B, then)
    assert_idle(llm)


def test_a_document_that_failed_is_in_use_once_a_request_has_computed_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(llm, monkeypatch, None)
    llm.chat([[{"role": "user", "content": [llm.engine.documents.get("doc"), "who?"]}]])
    with pytest.raises(DocumentExists):
        register(llm, B, None)


def test_a_document_that_is_there_keeps_its_id_when_another_context_fails(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(llm, A, FLAT)
    fail(llm, monkeypatch, None)
    with pytest.raises(DocumentExists):
        register(llm, B, None)


def test_a_registration_on_its_way_keeps_its_id(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(llm, monkeypatch, None)
    parts = llm.engine.prompts.from_document(A)
    llm.engine.documents.register(A, parts, "doc")
    with pytest.raises(DocumentExists):
        register(llm, B, None)


def test_a_failed_registration_takes_no_place_from_the_one_that_follows(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(llm, monkeypatch, None)
    parts = llm.engine.prompts.from_document(B)
    assert llm.engine.documents.register(B, parts, "doc", most=1).state == "computing"
    with pytest.raises(TooManyDocuments):
        llm.engine.documents.register(A, llm.engine.prompts.from_document(A), "more", most=1)


class Unread(dict[Any, Any]):
    """Entries that are found by their key, and never gone through."""

    def __iter__(self) -> Any:
        raise AssertionError("every document was looked at")

    items = keys = values = __iter__


def test_a_registration_looks_at_no_other_document(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    documents, prompts = llm.engine.documents, llm.engine.prompts
    documents._entries = {"": Unread(), "of another": Unread()}
    for most, one in enumerate((A, B), 1):
        documents.register(one, prompts.from_document(one), f"doc-{most}", most=most)
    with pytest.raises(TooManyDocuments):
        documents.register(A, prompts.from_document(A), "more", most=2)
    documents.register(A, prompts.from_document(A), "more", "of another", most=1)
    documents.delete("doc-1")
    documents.register(A, prompts.from_document(A), "more", most=2)
