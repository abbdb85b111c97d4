"""Registered documents: computed ahead, found by whoever asks about their text, kept by salt."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM, AsyncLLM, Document, Select
from looseleaf.config import IndexConfig
from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.errors import (
    DocumentExists,
    DocumentNotFound,
    EngineFault,
    InvalidRequest,
    PoolTooSmall,
)
from looseleaf.prompt.request import Request
from tests.engine.harness import GREEDY, Folder, assert_idle, document, drawn, make_llm, words

A, B = document(1, 100), document(2, 40)


@pytest.fixture
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint())


def chat(llm: LLM, *content: Any, salt: str = "", system: str | None = None) -> list[str]:
    """Where the documents of a chat came from."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": [*content, "who?"]}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    (output,) = llm.chat(messages, GREEDY, salt=salt)
    llm.engine.check()
    return [d.source for d in output.reuse.documents]


def test_a_registered_document_is_there_for_the_first_chat_that_holds_it(llm: LLM) -> None:
    info = llm.register(A)
    assert (info.state, info.tokens_done, info.name) == ("ready", info.num_tokens, "d1")
    assert info.num_pages == -(-info.num_tokens // 16)
    assert info.num_bytes == info.num_pages * llm.engine.store.pool.bytes_per_page
    assert info.seconds is not None and info.seconds > 0.0
    assert_idle(llm)
    assert chat(llm, A) == ["cached"]
    assert chat(llm, words(9, 20), B, llm.engine.documents.get(info.id)) == ["computed", "cached"]
    after = llm.engine.documents.stat(info.id)
    assert (after.hits, after.computed, after.references) == (2, 1, 0)


def test_only_the_tokens_that_a_document_needs_are_computed_ahead(llm: LLM) -> None:
    info = llm.register(A)
    lead = len(llm.engine.prompts.from_document(A)[0].tokens)
    assert llm.engine.counters.prompt_tokens == info.num_tokens + lead
    assert llm.engine.counters.output_tokens == llm.engine.counters.requests == 0


def test_its_context_is_what_the_chat_has_before_it(llm: LLM) -> None:
    llm.register(A, system="Be brief.")
    assert chat(llm, A) == ["computed"]
    assert chat(llm, A, system="Be brief.") == ["cached"]
    held = llm.hold_system_prompt(words(5, 30))
    llm.register(B, system_prompt=held, system="Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [B, "who?"]},
    ]
    (output,) = llm.chat(messages, GREEDY, system_prompt=held)
    assert [d.source for d in output.reuse.documents] == ["cached"]


def test_a_context_that_a_chat_brought_can_be_registered_and_forgotten(llm: LLM) -> None:
    info = llm.register(A)
    assert chat(llm, A, system="Be brief.") == ["computed"]
    again = llm.register(A, system="Be brief.")
    segments = list(llm.engine.store.segments())
    assert again.num_pages == 2 * info.num_pages
    # contexts of chats that are gone from the pool make way for new ones; registered ones stay
    for segment in segments:
        llm.engine.store.forget(segment)
    assert chat(llm, A, system="At length.") == ["computed"]
    llm.engine.documents.unpin(info.id)
    llm.engine.documents.delete(info.id)
    assert llm.engine.documents.all() == []
    assert_idle(llm)


def test_a_document_alone_is_registered_for_every_context(llm: LLM) -> None:
    alone = Document(A.text, name="alone", context="alone")
    llm.register(alone)
    assert chat(llm, alone, system="Be brief.") == chat(llm, alone) == ["cached"]
    with pytest.raises(InvalidRequest, match="ahead"):
        llm.register(Document("text", context="prompt"))


def test_registering_changes_no_answer(checkpoint: Folder) -> None:
    """Whether its documents were computed ahead, with the request, or found: the same tokens."""
    messages = [{"role": "user", "content": [A, "and", B, "who?"]}]
    params = drawn(5, max_tokens=12)
    answers = []
    for ahead in ((), (A,), (B, A)):
        llm = make_llm(checkpoint())
        for each in ahead:
            llm.register(each)
        answers += [llm.chat([messages], params)[0].token_ids for _ in range(2)]
        assert_idle(llm)
    assert len(set(answers)) == 1


def test_registering_again_changes_nothing_and_another_text_is_refused(llm: LLM) -> None:
    first = llm.register(A)
    steps = llm.engine.counters.steps
    assert llm.register(A).id == first.id
    assert llm.engine.counters.steps == steps
    named = llm.register(A, document_id="mine")
    assert llm.engine.counters.steps == steps
    assert [info.id for info in llm.engine.documents.all()] == [first.id, named.id]
    with pytest.raises(DocumentExists, match="'mine' is in use"):
        llm.register(B, document_id="mine")
    # a second context is computed, and belongs to the same document
    info = llm.register(A, system="Be brief.")
    assert (info.id, info.num_pages) == (first.id, 2 * first.num_pages)


def test_an_evicted_document_is_computed_again_by_the_request_that_needs_it(llm: LLM) -> None:
    info = llm.register(A)
    llm.engine.store.evict_idle()
    gone = llm.engine.documents.stat(info.id)
    assert (gone.state, gone.num_pages, gone.tokens_done) == ("evicted", 0, 0)
    assert chat(llm, llm.engine.documents.get(info.id)) == ["computed"]
    back = llm.engine.documents.stat(info.id)
    assert (back.state, back.computed) == ("ready", 2)


def test_a_pinned_document_outlives_eviction_until_it_is_unpinned(llm: LLM) -> None:
    info = llm.register(A, pinned=True)
    assert info.pinned
    llm.engine.store.evict_idle()
    assert llm.engine.documents.stat(info.id).state == "ready"
    assert llm.engine.store.page_counts.pinned == info.num_pages
    # one under another id keeps the pin of the first
    other = llm.register(A, document_id="other", pinned=True)
    llm.engine.documents.unpin(info.id)
    llm.engine.store.evict_idle()
    assert llm.engine.documents.stat(info.id).state == "ready"
    llm.engine.documents.unpin(other.id)
    llm.engine.store.evict_idle()
    assert llm.engine.documents.stat(info.id).state == "evicted"
    assert_idle(llm)


def test_pinning_an_evicted_document_computes_it_again(llm: LLM) -> None:
    info = llm.register(A)
    llm.engine.store.evict_idle()
    assert llm.engine.documents.pin(info.id).state == "computing"
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check()
    llm.engine.store.evict_idle()
    assert llm.engine.documents.stat(info.id).state == "ready"


def test_at_most_half_of_the_pool_can_be_pinned(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=16)
    first = llm.register(A, pinned=True)
    assert first.num_pages == 7
    with pytest.raises(PoolTooSmall, match="more than half of the pool, 8 pages"):
        llm.register(B, pinned=True)
    assert [info.id for info in llm.engine.documents.all()] == [first.id]
    second = llm.register(B)
    with pytest.raises(PoolTooSmall, match="unpin another"):
        llm.engine.documents.pin(second.id)
    assert not llm.engine.documents.stat(second.id).pinned
    llm.engine.documents.unpin(first.id)
    assert llm.engine.documents.pin(second.id).pinned
    assert len(chat(llm, A)) == 1


def test_a_deleted_document_frees_its_pages_at_once_if_nobody_reads_it(llm: LLM) -> None:
    free = llm.engine.store.pool.num_free
    info = llm.register(A, pinned=True)
    llm.register(A, system="Be brief.")
    assert chat(llm, A, system="Be quick.") == ["computed"]
    assert llm.engine.documents.stat(info.id).num_pages == 3 * info.num_pages
    assert llm.engine.documents.delete(info.id).pinned
    llm.engine.check()
    left = sum(len(s.pages) for s in llm.engine.store.segments() if s.length > 16)
    assert left == 0
    with pytest.raises(DocumentNotFound, match=info.id):
        llm.engine.documents.stat(info.id)
    assert chat(llm, A) == ["computed"]
    llm.engine.store.evict_idle()
    assert llm.engine.store.pool.num_free == free


def test_a_deleted_document_stays_for_those_who_read_it(llm: LLM) -> None:
    info = llm.register(A)
    parts = llm.engine.prompts.from_messages([{"role": "user", "content": [A, "who?"]}])
    stream = llm.stream(parts, GREEDY)
    next(stream)
    assert llm.engine.documents.stat(info.id).references == 1
    llm.engine.documents.delete(info.id)
    llm.engine.check()
    answer = list(stream)[-1]
    assert not [s for s in llm.engine.store.segments() if s.length > 16]
    assert_idle(llm)
    (again,) = llm.chat([{"role": "user", "content": [A, "who?"]}], GREEDY)
    assert again.token_ids == answer.token_ids


def test_a_document_under_two_ids_stays_until_both_are_deleted(llm: LLM) -> None:
    llm.register(A, document_id="one")
    llm.register(A, document_id="two")
    llm.engine.documents.delete("one")
    assert chat(llm, A) == ["cached"]
    llm.engine.documents.delete("two")
    assert chat(llm, A) == ["computed"]


@pytest.mark.parametrize("verb", ["get", "stat", "pin", "unpin", "delete", "failure"])
def test_no_salt_can_see_or_touch_a_document_of_another(llm: LLM, verb: str) -> None:
    info = llm.register(A, document_id="secret", salt="one")
    for salt in ("", "two"):
        with pytest.raises(DocumentNotFound):
            getattr(llm.engine.documents, verb)("secret", salt)
        assert llm.engine.documents.all(salt) == []
        assert chat(llm, A, salt=salt) == ["computed"]
    assert llm.engine.documents.all("one") == [info]
    assert llm.register(A, salt="two").id != llm.register(A, salt="one").id
    # the same id is free under another salt, for another text
    llm.register(B, document_id="secret", salt="two")
    assert llm.engine.documents.delete("secret", "two").num_tokens != info.num_tokens
    assert llm.engine.documents.stat("secret", "one").num_tokens == info.num_tokens
    assert chat(llm, A, salt="one") == ["cached"]


def test_what_cannot_be_computed_is_not_registered(checkpoint: Folder, llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="context holds"):
        llm.register(document(3, 300))
    small = make_llm(checkpoint(), num_pages=6)
    with pytest.raises(PoolTooSmall):
        small.register(A)
    assert llm.engine.documents.all() == small.engine.documents.all() == []
    assert_idle(llm)
    assert_idle(small)


def test_a_fault_while_it_is_computed_is_told_and_it_can_be_computed_later(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", lambda work: 1 / 0)
        with pytest.raises(EngineFault):
            llm.register(A, document_id="doomed")
    assert_idle(llm)
    assert llm.engine.documents.stat("doomed").state == "evicted"
    assert llm.register(A, document_id="doomed").state == "ready"
    assert chat(llm, A) == ["cached"]


@pytest.mark.parametrize("waits", [False, True])
def test_deleting_a_document_on_its_way_stops_it_unless_somebody_waits(
    checkpoint: Folder, waits: bool
) -> None:
    llm = make_llm(checkpoint(), max_num_batched_tokens=16, max_num_seqs=4)
    engine = llm.engine
    parts = engine.prompts.from_messages([{"role": "user", "content": [A, "who?"]}])
    info = engine.documents.register(A, engine.prompts.from_document(A))
    reader = engine.add(Request("reader", parts, GREEDY)) if waits else None
    while engine.documents.stat(info.id).tokens_done == 0:
        engine.step()
    assert 0 < engine.documents.stat(info.id).tokens_done < info.num_tokens
    engine.documents.delete(info.id)
    engine.check()
    assert engine.has_work == waits
    while engine.has_work:
        engine.step()
        engine.check()
    assert_idle(llm)
    if reader is not None:
        assert len(reader.output().token_ids) == 6
        assert [d.source for d in reader.output().reuse.documents] == ["awaited"]
    # what was deleted is gone with its last reader
    assert chat(llm, A) == ["computed"]


def test_registration_tells_how_far_it_is(checkpoint: Folder) -> None:
    seen: list[DocumentInfo] = []

    async def scenario() -> None:
        options: dict[str, Any] = {"dtype": "float32", "num_pages": 96}
        async with AsyncLLM(
            checkpoint(), max_num_batched_tokens=16, max_num_seqs=4, **options
        ) as llm:
            async for info in llm.register(A, salt="one", pinned=True):
                seen.append(info)
            assert (await llm.document(info.id, "one")).state == "ready"
            assert await llm.documents() == []
            assert [i.id for i in await llm.documents("one")] == [info.id]
            assert llm.registered([info.id], "one")[0].text == A.text
            with pytest.raises(DocumentNotFound):
                await llm.delete(info.id)
            assert not (await llm.unpin(info.id, "one")).pinned
            await llm.call(lambda engine: engine.store.evict_idle())
            assert (await llm.pin(info.id, "one")).state == "computing"
            await llm.delete(info.id, "one")
            with pytest.raises(DocumentNotFound):
                llm.registered([info.id], "one")

    asyncio.run(asyncio.wait_for(scenario(), 30))
    done = [info.tokens_done for info in seen]
    assert done == sorted(done) and len(set(done)) > 3
    assert [info.state for info in seen] == ["computing"] * (len(seen) - 1) + ["ready"]


def test_a_hosted_document_is_in_the_report_and_says_what_it_took(
    checkpoint: Folder, tmp_path: Path
) -> None:
    """Between documents of the pool, in the prompt's order; what a tier has is not computed."""
    index = IndexConfig("flat", sink=4, local=12)
    for loaded in (False, True):
        llm = make_llm(checkpoint(), disk_path=str(tmp_path))
        documents, book = llm.engine.documents, document(5, 90, context="alone")
        parts = llm.engine.prompts.from_document(book)
        documents.register(book, parts, "book", hosted=index)
        while (told := documents.stat("book")).state != "ready":
            llm.engine.step()
        assert told.computed == (not loaded) and (told.seconds is None) == loaded
        one, other = document(6), document(7)
        select = Select("retrieval", tokens=30)
        (output,) = llm.generate([[one, book, other, "What?"]], drawn(1), select=select)
        found = output.reuse.documents
        assert [d.hosted for d in found] == [False, True, False]
        assert found[1].source == "cached" and found[1].num_tokens == told.num_tokens
        assert found[0].offset < found[1].offset < found[2].offset
        assert all(d.seconds is not None for d in found) and "hosted" in str(output.reuse)
        documents.register(book, parts, "book", hosted=index)
        again = documents.stat("book")
        assert (again.hits, again.computed, again.seconds) == (1, told.computed, told.seconds)
        llm.engine.close()
