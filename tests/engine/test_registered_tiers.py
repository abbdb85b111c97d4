"""Registered documents with tiers below the pool: deleted everywhere, and counted by what became of
them."""

import threading
from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM
from looseleaf.engine.documents import entry as entries
from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.prompt.request import Request
from tests.engine.harness import GREEDY, Folder, assert_idle, words
from tests.engine.tiered import (
    DOCUMENTS,
    forget_pool,
    load_always,
    make_unruly,
    raise_fault,
    sources,
    tiered,
)

A = DOCUMENTS[2]
ASKED: list[Any] = [A, "who?"]


def fail_loads(llm: LLM) -> None:
    make_unruly(llm, lambda call, layer: raise_fault("damaged") if call == "read" else None)


def counted(llm: LLM) -> tuple[int, ...]:
    """Documents computed and loaded, and their tokens."""
    c = llm.engine.counters
    tokens = c.document_tokens_computed, c.document_tokens_loaded
    return c.documents_computed, c.documents_loaded, *tokens


def since(before: tuple[int, ...], llm: LLM) -> list[int]:
    """What was counted since then."""
    return [now - then for now, then in zip(counted(llm), before, strict=True)]


def booked(llm: LLM) -> tuple[int, int]:
    (info,) = llm.engine.documents.all()
    return info.hits, info.computed


def use_behind_leads(llm: LLM, count: int) -> None:
    """Use `A` behind so many texts, one after the other, and let the pool forget it each time."""
    for number in range(count):
        llm.generate([[words(90 + number, 18), *ASKED]], GREEDY)
        forget_pool(llm)


def test_a_document_deleted_while_it_comes_from_disk_is_nowhere_then(
    checkpoint: Folder, tmp_path: Path
) -> None:
    llm = tiered(checkpoint(), tmp_path, tier_timeout=20.0, host_gib=0.01)
    load_always(llm)
    info, tiers, engine = llm.register(A), llm.engine.tiers, llm.engine
    llm.generate([ASKED], GREEDY)
    forget_pool(llm)
    assert tiers is not None and tiers.host is not None
    tiers.host.delete([entry.key for entry in tiers.host.entries()])
    reading, go_on = threading.Event(), threading.Event()

    def mood(call: str, layer: int) -> None:
        if call == "read":
            reading.set()
            assert go_on.wait(15)

    make_unruly(llm, mood)
    engine.add(Request("asks", engine.prompts.from_parts(ASKED), GREEDY))
    busy = threading.Thread(
        target=lambda: [engine.step() for _ in iter(lambda: engine.has_work, 0)]
    )
    busy.start()
    assert reading.wait(15)
    engine.documents.delete(info.id)
    assert tiers.flush(30)
    go_on.set()
    busy.join(30)
    (output,) = llm.generate([ASKED], GREEDY)
    assert sources(output) == ["computed"]
    assert_idle(llm)
    llm.close()


@pytest.mark.parametrize("few", [1, 256])
def test_a_deleted_document_leaves_nothing_of_contexts_that_left_the_pool(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(entries, "_FEW", few)
    llm = tiered(checkpoint(), tmp_path)
    load_always(llm)
    info = llm.register(A)
    use_behind_leads(llm, 4)
    assert len(list(tmp_path.glob("*.segment"))) == 5
    # one that came back and one that nobody asked for since are found alike
    llm.generate([[words(90, 18), *ASKED]], GREEDY)
    llm.engine.documents.delete(info.id)
    assert llm.engine.tiers is not None and llm.engine.tiers.flush(30)
    assert list(tmp_path.glob("*.segment")) == []
    llm.close()


def test_contexts_that_no_tier_has_any_more_are_forgotten(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_FEW", 3)
    llm = tiered(checkpoint(), tmp_path)
    llm.register(A)
    for _ in range(3):
        use_behind_leads(llm, 3)
        assert llm.engine.tiers is not None
        disk = llm.engine.tiers.guards[0].tier
        disk.delete([entry.key for entry in disk.entries()])
    use_behind_leads(llm, 9)
    (known,) = llm.engine.documents._evicted_keys._keys.values()
    assert len(known) <= 9
    llm.close()


def test_the_same_text_under_another_id_keeps_what_the_tiers_have_of_it(
    checkpoint: Folder, tmp_path: Path
) -> None:
    llm = tiered(checkpoint(), tmp_path)
    load_always(llm)
    llm.register(A, document_id="one")
    llm.register(A, document_id="two")
    use_behind_leads(llm, 2)
    llm.engine.documents.delete("one")
    assert llm.engine.tiers is not None and llm.engine.tiers.flush(30)
    (output,) = llm.generate([[words(90, 18), *ASKED]], GREEDY)
    assert sources(output) == ["loaded"]
    forget_pool(llm)
    llm.engine.documents.delete("two")
    assert llm.engine.tiers.flush(30)
    assert list(tmp_path.glob("*.segment")) == []
    llm.close()


def test_a_load_that_failed_counts_as_computed_and_one_that_came_as_loaded(
    checkpoint: Folder, tmp_path: Path
) -> None:
    llm = tiered(checkpoint(), tmp_path)
    load_always(llm)
    tokens = llm.register(A).num_tokens
    llm.generate([ASKED], GREEDY)
    at_first, before = counted(llm), booked(llm)
    forget_pool(llm)
    (came,) = llm.generate([ASKED], GREEDY)
    assert sources(came) == ["loaded"] and "from disk" in str(came.reuse.loading)
    assert since(at_first, llm) == [0, 1, 0, tokens]
    assert booked(llm) == (before[0] + 1, before[1])
    forget_pool(llm)
    fail_loads(llm)
    (failed,) = llm.generate([ASKED], GREEDY)
    assert sources(failed) == ["computed"] and failed.reuse.loading is None
    assert since(at_first, llm) == [1, 1, tokens, tokens]
    assert booked(llm) == (before[0] + 1, before[1] + 1)
    llm.close()


def test_what_a_load_becomes_is_counted_once_it_is_known(
    checkpoint: Folder, tmp_path: Path
) -> None:
    llm = tiered(checkpoint(), tmp_path, tier_timeout=20.0)
    load_always(llm)
    two: list[Any] = [*DOCUMENTS[2:], "who?"]
    llm.generate([two], GREEDY)
    at_first = counted(llm)
    forget_pool(llm)
    fail_loads(llm)
    engine, seen = llm.engine, list[list[int]]()
    engine.add(Request("asks", engine.prompts.from_parts(two), GREEDY))
    while engine.has_work:
        engine.step()
        seen.append(since(at_first, llm))
    # nothing that failed is ever among what was loaded, and no sum falls
    assert [step[1] for step in seen] == [0] * len(seen)
    assert seen == sorted(seen) and seen[-1][:2] == [2, 0]
    assert_idle(llm)
    llm.close()


def test_a_request_that_leaves_before_its_document_came_is_counted_once(
    checkpoint: Folder, tmp_path: Path
) -> None:
    llm = tiered(checkpoint(), tmp_path, tier_timeout=20.0)
    load_always(llm)
    llm.generate([ASKED], GREEDY)
    forget_pool(llm)
    at_first = counted(llm)
    reading, go_on = threading.Event(), threading.Event()

    def mood(call: str, layer: int) -> None:
        if call == "read":
            reading.set()
            assert go_on.wait(15)

    make_unruly(llm, mood)
    engine = llm.engine
    engine.add(Request("leaves", engine.prompts.from_parts(ASKED), GREEDY))
    engine.add(Request("busy", engine.prompts.from_parts([words(8, 9)]), GREEDY))
    engine.step()
    assert reading.wait(15)
    engine.abort("leaves")
    go_on.set()
    while engine.has_work:
        engine.step()
    assert since(at_first, llm)[:2] == [0, 1]
    assert not engine.accounting._coming
    llm.close()


def test_registering_ahead_what_can_not_be_loaded_computes_it(
    checkpoint: Folder, tmp_path: Path
) -> None:
    first = tiered(checkpoint(), tmp_path)
    first.register(A)
    first.close()
    llm = tiered(checkpoint(), tmp_path)
    load_always(llm)
    fail_loads(llm)
    info: DocumentInfo = llm.register(A)
    assert (info.state, info.computed, info.hits) == ("ready", 1, 0)
    llm.close()
