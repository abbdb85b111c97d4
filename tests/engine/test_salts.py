"""Different salts share nothing: no document, no page of text, no computation on its way."""

from typing import Any

import pytest

from looseleaf import LLM, Document, IndexConfig, SamplingParams
from looseleaf.engine.documents.entry import Registered
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.sampling.grammar import GrammarCompiler
from looseleaf.errors import PoolTooSmall
from looseleaf.prompt.request import Request
from looseleaf.sampling_params import Grammar
from tests.engine.harness import (
    GREEDY,
    Folder,
    assert_idle,
    assert_same_answers,
    document,
    make_llm,
    words,
)
from tests.engine.harness import ask as ask_unsalted

LEAD, A, B = words(1, 40), document(1, 45), document(2, 18)
PROMPT = [LEAD, A, B, words(10, 40)]


@pytest.fixture
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint())


def add(llm: LLM, name: str, salt: str, params: SamplingParams = GREEDY) -> RequestProgress:
    return llm.engine.add(Request(name, llm.engine.prompts.from_parts(PROMPT), params, salt))


def sources(progress: RequestProgress) -> list[str]:
    return [d.source for d in progress.output().reuse.documents]


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check()
    assert_idle(llm)


def test_what_one_salt_stored_is_unknown_to_every_other(llm: LLM) -> None:
    computed = []
    for salt in ("", "one", "two", "one", "two", ""):
        before = llm.engine.counters.prompt_tokens
        (output,) = llm.generate([PROMPT], GREEDY, salt=salt)
        computed.append(llm.engine.counters.prompt_tokens - before)
        found = {d.source for d in output.reuse.documents}
        first = len(computed) <= 3
        assert found == ({"computed"} if first else {"cached"})
        assert (output.reuse.text_tokens_cached == 0) == first
    whole = sum(len(part.tokens) for part in llm.engine.prompts.from_parts(PROMPT))
    assert computed[:3] == [whole] * 3
    assert max(computed[3:]) < 40
    assert_idle(llm)


def test_no_salt_waits_for_what_another_computes(llm: LLM) -> None:
    """Neither for a document nor for a page of text, and nothing is read together."""
    both = [add(llm, "one", "one"), add(llm, "two", "two")]
    llm.engine.step()
    llm.engine.check()
    assert all(progress.metrics.admitted is not None for progress in both)
    finish(llm)
    assert [sources(progress) for progress in both] == [["computed"] * 2] * 2
    assert llm.engine.counters.grouped_items == 0
    assert both[0].output().token_ids == both[1].output().token_ids


def test_under_one_salt_everything_is_shared_as_without(llm: LLM) -> None:
    both = [add(llm, "one", "tenant"), add(llm, "two", "tenant")]
    finish(llm)
    assert [sources(progress) for progress in both] == [["computed"] * 2, ["cached"] * 2]
    assert both[1].output().reuse.text_tokens_cached > 0


def test_a_salt_changes_no_answer(checkpoint: Folder) -> None:
    plain = ask_unsalted(make_llm(checkpoint()), [PROMPT])
    salted_engine = ask_unsalted(make_llm(checkpoint(), salt="engine"), [PROMPT])
    assert_same_answers(plain, salted_engine)
    (output,) = make_llm(checkpoint()).generate([PROMPT], GREEDY, salt="tenant")
    assert output.token_ids == plain[0].token_ids


def test_all_keys_of_two_salts_and_of_two_engines_differ(checkpoint: Folder) -> None:
    seen: set[bytes] = set()
    total = 0
    for engine_salt in ("", "tenant"):
        llm = make_llm(checkpoint(), salt=engine_salt)
        for salt in ("", "tenant", "tenant2"):
            llm.engine.store.evict_idle()
            llm.generate([PROMPT], GREEDY, salt=salt)
            keys = {segment.key for segment in llm.engine.store.segments()}
            total += len(keys)
            seen |= keys
    assert len(seen) == total > 0


def test_a_document_on_its_way_is_not_handed_to_another_salt(checkpoint: Folder) -> None:
    """Its owner leaves while somebody else wants the same text: nobody inherits it."""
    llm = make_llm(checkpoint(), max_num_batched_tokens=16, max_num_seqs=4)
    parts = llm.engine.prompts.from_parts([LEAD, document(4, 120), words(10, 9)])
    for name in ("one", "two"):
        llm.engine.add(Request(name, parts, GREEDY, salt=name))
    for _ in range(5):
        llm.engine.step()
    assert sum(not segment.ready for segment in llm.engine.store.segments()) == 2
    llm.engine.abort("one")
    llm.engine.check()
    assert sum(not segment.ready for segment in llm.engine.store.segments()) == 1
    finish(llm)


class Elsewhere(dict[str, Registered]):
    """Registered documents of another salt, which nobody looks at."""

    def __iter__(self) -> Any:
        raise AssertionError("another salt's documents were looked at")

    items = keys = values = get = __iter__  # type: ignore[assignment]


def test_what_is_done_with_documents_looks_at_none_of_another_salt(llm: LLM) -> None:
    documents = llm.engine.documents
    parts = llm.engine.prompts.from_document(A)
    documents.register(A, parts, "a", "one")
    documents._entries["one"] = Elsewhere(documents._entries["one"])
    documents.register(A, parts, "a", "two", hosted=IndexConfig("flat"), most=1)
    assert [info.id for info in documents.all("two")] == ["a"]
    assert documents.stat("a", "two").id == "a"
    documents.delete("a", "two")
    assert documents.all("two") == []
    assert len(documents) == 1


def test_a_refusal_does_not_tell_how_much_another_salt_has_pinned(checkpoint: Folder) -> None:
    def told(pages: int) -> list[str]:
        llm = make_llm(checkpoint(), num_pages=16)
        page_size = llm.engine.store.pool.page_size
        pinned = Document(words(1, pages * page_size - 3), context="alone")
        llm.register(pinned, salt="one", pinned=True)
        with pytest.raises(PoolTooSmall) as to_pin:
            llm.register(document(3, 6 * page_size), salt="two", pinned=True)
        many = SamplingParams(max_tokens=14 * page_size)
        with pytest.raises(PoolTooSmall) as to_answer:
            llm.generate("who?", many, salt="two")
        return [str(to_pin.value), str(to_answer.value)]

    assert told(3) == told(5)


def test_a_grammar_of_one_salt_is_compiled_again_for_another(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long an answer takes would tell that somebody else has asked for the same."""
    compiled, compiling = list[str](), GrammarCompiler._compile

    def counted(self: GrammarCompiler, grammar: Grammar, *about: Any) -> Any:
        compiled.append(grammar.source)
        return compiling(self, grammar, *about)

    monkeypatch.setattr(GrammarCompiler, "_compile", counted)
    llm = make_llm(checkpoint())
    params = SamplingParams(max_tokens=2, grammar=Grammar.regex("yes|no"))
    numbers = []
    for salt in ("one", "two", "one", "two", ""):
        llm.generate([PROMPT], params, salt=salt)
        numbers.append(len(compiled))
    assert numbers == [1, 2, 2, 2, 3]
