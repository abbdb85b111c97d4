"""What the engine counts adds up: pages by state, documents once a request, tokens, times."""

import asyncio
import time
from dataclasses import fields
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from looseleaf import LLM, AsyncLLM
from looseleaf.errors import InvalidOption
from looseleaf.llm.load import load_engine
from looseleaf.prompt.request import Request
from looseleaf.server.engine_metrics import _EngineCollector
from tests.engine.harness import GREEDY, Folder, assert_idle, document, drawn, make_llm, words

LEAD, A, B = words(1, 19), document(1, 60), document(2, 30)


@pytest.fixture
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint(), max_num_batched_tokens=16, max_num_seqs=4)


def pages_by_hand(llm: LLM) -> tuple[int, ...]:
    """Every page of the pool by state, found by looking at each segment."""
    segments = list(llm.engine.store.segments())
    free = llm.engine.store.pool.num_free
    referenced = sum(len(s.pages) for s in segments if s.references)
    pinned = sum(len(s.pages) for s in segments if not s.references and s.pinned)
    idle = sum(len(s.pages) for s in segments if not s.references and not s.pinned)
    total = llm.engine.store.pool.num_pages
    return total, free, total - free - referenced - pinned - idle, referenced, pinned, idle


def test_the_page_counts_are_those_found_by_looking_at_every_segment(llm: LLM) -> None:
    engine = llm.engine
    info = llm.register(B, pinned=True)
    prompts = [[LEAD, A, B, words(20 + n, 30)] for n in range(5)]
    for n, prompt in enumerate(prompts):
        engine.add(Request(f"r{n}", engine.prompts.from_parts(prompt), drawn(n, max_tokens=20)))
    seen = set()
    while engine.has_work:
        engine.step()
        engine.check()
        snapshot = engine.snapshot()
        assert tuple(snapshot.pages) == pages_by_hand(llm)
        assert snapshot.pages.total == sum(snapshot.pages[1:])
        assert snapshot.running + snapshot.waiting <= 5
        seen.add(snapshot.waiting > 0)
    assert seen == {True, False}
    engine.documents.delete(info.id)
    assert tuple(engine.snapshot().pages) == pages_by_hand(llm)


def test_a_document_counts_once_a_request_whatever_happens_to_it(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=18)
    prompts = [[LEAD, A, words(20 + n, 9)] for n in range(3)]
    params = [drawn(n, max_tokens=70, n=2 if n == 0 else 1) for n in range(3)]
    llm.generate(prompts, params)
    counters = llm.engine.counters
    assert counters.preemptions > 0
    found = (counters.documents_computed, counters.documents_awaited, counters.documents_cached)
    assert found[0] == 1 and sum(found) == 3
    tokens = len(llm.engine.prompts.from_document(A)[1].tokens)
    assert counters.document_tokens_computed == tokens
    assert (counters.requests, counters.finished) == (3, 3)
    assert_idle(llm)


def test_tokens_cached_and_computed_add_up_to_the_prompts(llm: LLM) -> None:
    prompts = [[LEAD, A, B, words(20 + n, 40)] for n in (1, 2, 1)]
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    counters = llm.engine.counters
    assert counters.text_tokens == sum(o.reuse.text_tokens for o in outputs)
    assert counters.text_tokens_cached == sum(o.reuse.text_tokens_cached for o in outputs) > 0
    documents = counters.document_tokens_computed + counters.document_tokens_cached
    assert documents + counters.text_tokens == sum(len(o.prompt_token_ids) for o in outputs)
    computed = counters.text_tokens - counters.text_tokens_cached
    assert counters.prompt_tokens == computed + counters.document_tokens_computed
    assert counters.output_tokens == sum(len(o.token_ids) for o in outputs)


def test_an_exact_prefix_and_a_reused_document_are_told_apart(llm: LLM) -> None:
    llm.generate([[LEAD, A, words(20, 40)]], GREEDY)
    (prefix,) = llm.generate([[LEAD, A, words(20, 40)]], GREEDY)
    (moved,) = llm.generate([[LEAD, B, A, words(20, 40)]], GREEDY)
    assert prefix.reuse.text_tokens_cached > moved.reuse.text_tokens_cached == 16
    assert prefix.reuse.document_tokens_reused == moved.reuse.document_tokens_reused
    assert [d.source for d in moved.reuse.documents] == ["computed", "cached"]


def test_the_times_of_documents_are_those_it_took_them_to_be_there(llm: LLM) -> None:
    engine = llm.engine
    begun = time.perf_counter()
    prompt = engine.prompts.from_parts([LEAD, A, B, words(20, 9)])
    first = engine.add(Request("first", prompt, GREEDY))
    second = engine.add(Request("second", prompt, GREEDY, salt=""))
    third = engine.add(Request("third", engine.prompts.from_parts([LEAD, A, "now?"]), GREEDY))
    engine.step()
    assert [d.seconds for d in first.output().reuse.documents] == [None, None]
    while engine.has_work:
        engine.step()
    whole = time.perf_counter() - begun
    for progress in (first, second, third):
        for found in progress.output().reuse.documents:
            assert found.seconds is not None
            assert (found.seconds == 0.0) == (found.source == "cached")
            assert found.seconds < whole
    reports = [p.output().reuse.documents for p in (first, third)]
    assert [d.source for d in reports[0]] == ["computed", "computed"]
    again = llm.generate([[LEAD, A, B, words(20, 9)]], GREEDY)[0].reuse.documents
    assert [(d.source, d.seconds) for d in again] == [("cached", 0.0)] * 2


def test_a_lone_request_shares_no_read_and_siblings_share_almost_all(llm: LLM) -> None:
    (alone,) = llm.generate([[LEAD, A, words(20, 9)]], drawn(1))
    assert (alone.attention.decode_steps, alone.attention.keys_shared) == (5, 0)
    (several,) = llm.generate([[LEAD, A, words(20, 9)]], drawn(1, n=3))
    path = several.attention
    assert path.decode_steps == 15
    assert 0 < path.grouped_steps <= 15
    assert path.keys_read > path.keys_shared > path.keys_read // 2


def test_a_snapshot_can_be_read_at_any_time_and_never_waits(checkpoint: Folder) -> None:
    async def scenario() -> None:
        options: dict[str, Any] = {"dtype": "float32", "num_pages": 96}
        async with AsyncLLM(checkpoint(), **options) as llm:
            before = llm.snapshot()
            outputs = [o async for o in llm.generate([LEAD, A, "who?"], drawn(1))]
            await llm.call(lambda engine: None)
            after = llm.snapshot()
            assert before.counters.output_tokens == 0
            assert after.counters.output_tokens == len(outputs[-1].token_ids)
            assert (after.running, after.waiting, after.counters.finished) == (0, 0, 1)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_context_beyond_the_models_own_is_refused(checkpoint: Folder) -> None:
    with pytest.raises(InvalidOption, match=r"257.*more than the 256 tokens"):
        make_llm(checkpoint(), max_model_len=257)
    assert make_llm(checkpoint(), max_model_len=256).engine.max_model_len == 256
    # a law that stretches positions by its own reaches further
    stretched = make_llm(checkpoint("llama", "dynamic"), max_model_len=400)
    assert stretched.engine.max_model_len == 400


def test_what_the_planner_chose_is_counted_and_exported(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    llm.engine = load_engine(checkpoint(), llm.engine.config, "reference")
    for prompts in ([[LEAD, A, words(9, 9)]], [[LEAD, A, words(n, 9)] for n in range(3)]):
        llm.generate(prompts, drawn(0, max_tokens=6))
    plan, sums = llm.engine.runner.attention.counters, llm.engine.counters
    # a document of four pages is not worth reading together
    assert plan.refused_groups > 0
    assert plan.narrow_pieces > plan.items > 0
    registry = CollectorRegistry()
    registry.register(_EngineCollector(llm.engine.snapshot))
    shown = generate_latest(registry).decode()
    for name, count in (
        ("refused_groups_total", sums.refused_groups),
        ('work_pieces_total{tile="narrow"}', sums.narrow_pieces),
        ('work_pieces_total{tile="wide"}', sums.wide_pieces),
        ("gathered_keys_total", sums.gathered_keys),
    ):
        assert f"looseleaf_{name} {float(count)}" in shown
    chosen = {f.name: getattr(plan, f.name) for f in fields(plan)}
    assert chosen == {name: getattr(sums, name) for name in chosen}
