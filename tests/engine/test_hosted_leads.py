"""A hosted document is found behind the beginning that it was hosted behind; another is told so."""

import pytest

from looseleaf import LLM, Document, Select
from looseleaf.config import IndexConfig
from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.engine.documents.host_prefill import HostedPass
from looseleaf.errors import InvalidRequest
from tests.engine.harness import GREEDY, Folder, make_llm, words

INDEX = IndexConfig("flat", sink=4, local=12)
FEW = Select("retrieval", tokens=40)


def test_what_is_hosted_behind_the_lead_of_a_chat_is_asked_for_by_chat(checkpoint: Folder) -> None:
    llm, report = make_llm(checkpoint(), num_pages=64), Document(words(3, 150))
    llm.host(report, index=INDEX)
    with pytest.raises(InvalidRequest, match=r"llm\.chat; or host Document\(text, context='alone'"):
        llm.generate([[report, "who?"]], GREEDY, select=FEW)
    asked = {"role": "user", "content": [report, "who?"]}
    (answer,) = llm.chat([asked], GREEDY, select=FEW)
    assert answer.reuse.documents[0].hosted
    with pytest.raises(InvalidRequest, match="its system text included"):
        llm.chat([{"role": "system", "content": "Be brief."}, asked], GREEDY, select=FEW)


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


def hosted_in_vain(llm: LLM, text: Document) -> bool:
    """Whether nobody can read a document by an index."""
    try:
        llm.chat([{"role": "user", "content": [text, "who?"]}], GREEDY, select=FEW)
    except InvalidRequest:
        return True
    return False


def test_a_deleted_document_is_gone_behind_every_beginning_that_it_was_hosted_behind(
    checkpoint: Folder,
) -> None:
    llm, text = make_llm(checkpoint(), num_pages=64), Document(words(3, 150))
    documents, prompts = llm.engine.documents, llm.engine.prompts
    for system in (None, "Be brief."):
        parts = prompts.from_document(text, None, system)
        documents.register(text, parts, "it", hosted=INDEX)
        while documents.stat("it").state == "computing":
            llm.engine.step()
    info = documents.stat("it")
    one = llm.host(text, index=INDEX).num_bytes
    assert (info.state, info.computed, info.num_bytes) == ("ready", 2, 2 * one)
    assert not hosted_in_vain(llm, text)
    documents.delete("it")
    assert hosted_in_vain(llm, text) and not llm.engine.hosting._segments


def test_a_document_that_failed_behind_one_beginning_is_ready_behind_another(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, text = make_llm(checkpoint(), num_pages=64), Document(words(3, 150))
    documents, prompts = llm.engine.documents, llm.engine.prompts

    def register(system: str | None) -> DocumentInfo:
        parts = prompts.from_document(text, None, system)
        documents.register(text, parts, "it", hosted=INDEX)
        while documents.stat("it").state == "computing":
            llm.engine.step()
        return documents.stat("it")

    def fail(*_: object) -> None:
        raise MemoryError("no room for the chunk")

    ready = register(None)
    with monkeypatch.context() as patch:
        patch.setattr(HostedPass, "advance", fail)
        failed = register("Be brief.")
    assert documents.failure("it") is not None
    assert (failed.state, failed.tokens_done) == (ready.state, ready.tokens_done)
    assert failed.state == "ready" and not hosted_in_vain(llm, text)
    assert failed.num_bytes == ready.num_bytes, "what failed takes no memory"
    # what has failed everywhere is nowhere
    documents.delete("it")
    with monkeypatch.context() as patch:
        patch.setattr(HostedPass, "advance", fail)
        assert register(None).state == "evicted"


def test_what_is_hosted_has_no_pages_to_pin(checkpoint: Folder) -> None:
    llm, text = make_llm(checkpoint(), num_pages=64), Document(words(3, 150))
    documents, parts = llm.engine.documents, llm.engine.prompts.from_document(text)
    with pytest.raises(InvalidRequest, match="no pages to pin"):
        documents.register(text, parts, "it", hosted=INDEX, pinned=True)
    documents.register(text, parts, "it", hosted=INDEX)
    with pytest.raises(InvalidRequest, match="no pages to pin"):
        documents.pin("it")
    assert not documents.stat("it").pinned
    # in the pool as well there is something to pin
    documents.register(text, parts, "it")
    assert documents.pin("it").pinned


def test_a_document_on_its_way_is_told_from_one_that_nobody_hosts(checkpoint: Folder) -> None:
    """And has the index that was asked for first: another one is refused, and not forgotten."""
    llm, text = make_llm(checkpoint(), num_pages=64), Document(words(3, 150), name="notes")
    hosting, parts = llm.engine.hosting, llm.engine.prompts.from_document(text)
    job = hosting.add(parts, "", INDEX)
    assert hosting.add(parts, "", INDEX) is job
    with pytest.raises(InvalidRequest, match="'notes' is still being hosted: ask again"):
        llm.chat([{"role": "user", "content": [text, "who?"]}], GREEDY, select=FEW)
    with pytest.raises(InvalidRequest, match=r"kind 'flat', not 'ivf'; sink 4, not 16.*: wait"):
        hosting.add(parts, "", IndexConfig("ivf"))
    assert llm.host(text, index=INDEX) is job.segment
    other = llm.host(text, index=IndexConfig("ivf")).index
    assert other is not None and other.config.kind == "ivf"


@pytest.mark.parametrize("stage", ["computing", "indexing"])
def test_who_hosts_a_document_that_is_deleted_meanwhile_is_told(
    checkpoint: Folder, stage: str
) -> None:
    llm, text = make_llm(checkpoint(), num_pages=64), Document(words(3, 150))
    hosting = llm.engine.hosting

    def delete(at: str, done: int, total: int) -> None:
        # in the step that ends the computing, too
        if at == stage and done == (total if at == "computing" else done):
            for key in list(hosting._jobs):
                hosting.forget(key)

    with pytest.raises(InvalidRequest, match="deleted while it was hosted"):
        llm.host(text, index=IndexConfig("ivf", sink=4, local=12), on_progress=delete)
    assert hosted_in_vain(llm, text)
