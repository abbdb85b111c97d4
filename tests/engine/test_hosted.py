"""Hosted documents: read where they lie, at any place, longer than the pool, back after a restart.

Random weights: these laws are about plumbing, not quality."""

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf import LLM, AsyncLLM, Document, SamplingParams
from looseleaf.config import Fuse, IndexConfig, Select
from looseleaf.engine.documents.hosting import HostedPass, Hosting
from looseleaf.errors import EngineFault, InvalidRequest, PoolTooSmall
from looseleaf.index import build_segment
from looseleaf.index.host.segment import HostedSegment
from looseleaf.tiers import DiskTier, Ledger, tenant_of
from tests.checkpoints import make_checkpoint
from tests.engine.harness import GREEDY, TOLERANCE, Folder, Recorder, document, words

LONG = 700
INDEX = IndexConfig("graph", sink=4, local=12, degree=8, top=20)
ALL = Select("retrieval", ratio=1.0)
FEW = Select("retrieval", tokens=40)


def make(folder: Path, **options: Any) -> LLM:
    options = {"num_pages": 256, "max_model_len": 1024, "dtype": "float32", **options}
    return LLM(folder, device="cpu", **options)


def logits(llm: LLM, prompt: Any, select: Select | None, **options: Any) -> Tensor:
    """Of all tokens of the answer."""
    kept = llm.engine.runner
    recorder = Recorder(kept)
    llm.engine.runner = recorder  # type: ignore[assignment]
    try:
        llm.generate([prompt], GREEDY, select=select, **options)
    finally:
        llm.engine.runner = kept
    (rows,) = recorder.logits.values()
    return torch.stack(rows)


def prompt(seed: int = 0, before: str = "Read this. ") -> list[Any]:
    return [before, document(seed, LONG, context="alone"), "What stands in it?"]


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "tier", Ledger(1 << 30))


@pytest.mark.parametrize("kind", ["flat", "ivf", "graph"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_full_budget_equals_dense_attention(checkpoint: Folder, kind: str, kernels: str) -> None:
    llm = make(checkpoint("llama", "dynamic"), cpu_kernels=kernels)
    expected = logits(llm, prompt(), None)
    config = IndexConfig(kind, sink=4, local=12, degree=8)  # type: ignore[arg-type]
    llm.host(document(0, LONG, context="alone"), index=config)
    torch.testing.assert_close(logits(llm, prompt(), ALL), expected, rtol=0, atol=TOLERANCE)
    llm.engine.check()


def test_a_hosted_collection_equals_its_documents_in_full_attention(checkpoint: Folder) -> None:
    llm = make(checkpoint("llama", "dynamic"))
    texts = [words(n, LONG // 7 + n) for n in range(7)]
    question = "What stands in them?"
    expected = logits(llm, [*(Document(text, context="prompt") for text in texts), question], None)
    collection = Document(texts, context="alone")
    # in the pool it is one document of the same tokens
    in_pool = logits(llm, [collection, question], None)
    torch.testing.assert_close(in_pool, expected, rtol=0, atol=TOLERANCE)
    segment = llm.host(collection, index=INDEX)
    assert segment.num_tokens > LONG and len(llm.engine.hosting._segments) == 1
    torch.testing.assert_close(
        logits(llm, [collection, question], ALL), expected, rtol=0, atol=TOLERANCE
    )
    joined = Document(" ".join(texts), context="alone")
    assert not torch.allclose(
        logits(llm, [joined, question], None), expected, rtol=0, atol=TOLERANCE
    )


def test_hosting_in_16_bits_errs_as_the_pool_does(checkpoint: Folder) -> None:
    exact, narrow = (make(checkpoint("llama", "dynamic"), dtype=d) for d in ("float32", "bfloat16"))
    expected = logits(exact, prompt(), None)
    pool = logits(narrow, prompt(), None).float()
    narrow.host(document(0, LONG, context="alone"), index=INDEX)
    hosted = logits(narrow, prompt(), ALL).float()
    # the first token's row: behind another token they may read on differently
    errors = [float((rows - expected)[0].norm()) for rows in (hosted, pool)]
    assert 0 < errors[0] < 3 * errors[1], errors


@pytest.mark.parametrize("family", ["qwen3", "smollm3", "ministral3", "glm4", "granite", "olmo2"])
def test_other_families_read_hosted_documents(checkpoint: Folder, family: str) -> None:
    llm = make(checkpoint(family, "dynamic"))
    llm.host(document(0, LONG, context="alone"), index=INDEX)
    expected = logits(make(checkpoint(family, "dynamic")), prompt(), None)
    torch.testing.assert_close(logits(llm, prompt(), ALL), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_sink_enters_once_where_a_row_reads_hosted_documents(
    tmp_path: Path, kernels: str
) -> None:
    """In layers without windows, which hosted documents need; in prompt rows and decode rows."""
    full = ["full_attention"] * 3
    folder = make_checkpoint(tmp_path, "gpt_oss", "dynamic", layer_types=full)
    llm = make(folder, cpu_kernels=kernels)
    expected = logits(llm, prompt(), None)
    llm.host(document(0, LONG, context="alone"), index=INDEX)
    torch.testing.assert_close(logits(llm, prompt(), ALL), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layers", ["flat", "pyramid", (1.0, 5.0, 2.0)])
def test_a_small_budget_reads_few_keys_and_says_so(checkpoint: Folder, layers: Any) -> None:
    llm = make(checkpoint("llama", "dynamic"))
    llm.host(document(0, LONG, context="alone"), index=INDEX)
    hosted = llm.engine.runner.attention.hosted
    assert hosted is not None
    hosted.sample = 1.0
    llm.generate([prompt()], GREEDY, select=replace(FEW, layer_budgets=layers))
    counters = hosted.counters
    assert counters.share_read == pytest.approx(40 / LONG, abs=0.01)
    assert counters.share_scanned is not None and 0 < counters.share_scanned < 1
    snapshot = llm.engine.snapshot().hosted
    assert snapshot is not None and snapshot == counters and snapshot is not counters
    assert counters.sampled > 0 and counters.recall is not None and counters.recall > 0.5


def test_two_places_share_one_index_and_find_the_same(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(checkpoint("llama", "dynamic"))
    segment = llm.host(document(0, LONG, context="alone"), index=INDEX)
    searches: list[Tensor] = []
    from looseleaf.index.host import attend as module

    plain = module.search_each

    def watched(indexes: Any, queries: Tensor, *args: Any, **options: Any) -> Any:
        hits, state = plain(indexes, queries, *args, **options)
        searches.append(torch.cat((queries.flatten(), hits.ids.flatten())))
        assert all(index in segment.index.units.values() for index in indexes)
        return hits, state

    monkeypatch.setattr(module, "search_each", watched)
    attention = llm.engine.runner.attention
    assert attention.hosted is not None
    q = torch.randn(1, 4, segment.kv.shape[-1])
    for offset in (0, 3, 170):
        read = module.HostedRead(segment, offset, 20)
        attention.hosted.decode(1, q, [offset + LONG + 9], [(read,)], attention.rules[1])
    assert torch.equal(searches[0], searches[1]) and torch.equal(searches[0], searches[2])
    llm.generate([prompt(0, "One. "), prompt(0, "A longer beginning. ")], GREEDY, select=FEW)
    assert llm.engine.hosting.built == 1


def test_a_document_longer_than_the_pool_is_answered(checkpoint: Folder) -> None:
    small = make(checkpoint("llama", "dynamic"), num_pages=5, max_num_batched_tokens=64)
    assert LONG > 8 * 5 * 16
    with pytest.raises(PoolTooSmall):
        small.generate([prompt()], GREEDY)
    stages: list[str] = []
    small.host(
        document(0, LONG, context="alone"), index=INDEX,
        on_progress=lambda stage, count, total: stages.append(f"{stage} {count}/{total}"),
    )  # fmt: skip
    with pytest.raises(PoolTooSmall, match="since one is hosted"):
        small.generate([prompt()], GREEDY)
    assert "computing 64/" in stages[0] and stages[-1].startswith("indexing")
    expected = logits(make(checkpoint("llama", "dynamic")), prompt(), None)
    torch.testing.assert_close(logits(small, prompt(), ALL), expected, rtol=0, atol=TOLERANCE)
    assert small.generate([prompt()], GREEDY, select=FEW)[0].finished
    small.engine.check()


@pytest.mark.parametrize("index", [INDEX, IndexConfig("ivf", estimate=True)], ids=["", "estimate"])
def test_a_restart_takes_keys_and_index_from_the_tier(
    checkpoint: Folder, tier: DiskTier, monkeypatch: pytest.MonkeyPatch, index: IndexConfig
) -> None:
    first = make(checkpoint("llama", "dynamic"))
    first.engine.hosting.tier = tier
    first.host(document(0, LONG, context="alone"), index=index)
    expected = logits(first, prompt(), FEW)
    again = make(checkpoint("llama", "dynamic"), num_pages=5)
    again.engine.hosting.tier = DiskTier(tier.folder, Ledger(1 << 30))
    with monkeypatch.context() as patch:
        patch.setattr(Hosting, "_index", lambda self, job: pytest.fail("it was built again"))
        again.host(document(0, LONG, context="alone"), index=index)
    hosting = again.engine.hosting
    assert (hosting.loaded, hosting.built, again.engine.counters.steps) == (1, 0, 0)
    assert torch.equal(logits(again, prompt(), FEW), expected)


@pytest.mark.parametrize("suffix", [".segment", ".sidecar"])
def test_a_damaged_store_costs_time_and_no_answer(
    checkpoint: Folder, tier: DiskTier, suffix: str
) -> None:
    first = make(checkpoint("llama", "dynamic"))
    first.engine.hosting.tier = tier
    first.host(document(0, LONG, context="alone"), index=INDEX)
    expected = logits(first, prompt(), FEW)
    (path,) = tier.folder.glob(f"*{suffix}")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))
    again = make(checkpoint("llama", "dynamic"))
    again.engine.hosting.tier = DiskTier(tier.folder, Ledger(1 << 30))
    again.host(document(0, LONG, context="alone"), index=INDEX)
    assert (again.engine.hosting.loaded, again.engine.hosting.built) == (0, 1)
    torch.testing.assert_close(logits(again, prompt(), FEW), expected, rtol=0, atol=TOLERANCE)


def test_requests_go_on_while_a_document_is_hosted(checkpoint: Folder) -> None:
    llm = make(checkpoint("llama", "dynamic"), max_num_batched_tokens=64)
    expected = llm.generate(["Once"], GREEDY)[0].token_ids
    parts = llm.engine.prompts.from_document(document(0, LONG, context="alone"))
    job = llm.engine.hosting.add(parts, "", INDEX)
    assert llm.generate(["Once"], GREEDY)[0].token_ids == expected
    assert job.stage == "computing" and 0 < job.segment.filled < LONG
    while llm.engine.has_work:
        llm.engine.step()
    assert job.finished.wait(60) and job.error is None


def test_mixed_requests_equal_one_at_a_time(checkpoint: Folder) -> None:
    llm = make(checkpoint("llama", "dynamic"))
    llm.host(document(0, LONG, context="alone"), index=INDEX)
    singles = [
        llm.generate([prompt(0, b)], GREEDY, select=FEW)[0].token_ids for b in ("One. ", "Or. ")
    ]
    both = llm.generate([prompt(0, "One. "), prompt(0, "Or. ")], GREEDY, select=FEW)
    assert [output.token_ids for output in both] == singles


def test_what_has_no_meaning_is_refused(checkpoint: Folder) -> None:
    llm = make(checkpoint("llama", "dynamic"))
    with pytest.raises(InvalidRequest, match="none of this request's documents is hosted"):
        llm.generate([prompt()], GREEDY, select=FEW)
    llm.host(document(0, LONG, context="alone"), index=INDEX)
    with pytest.raises(InvalidRequest, match="fuse can't be combined"):
        llm.generate([prompt()], GREEDY, select=FEW, fuse=Fuse("first", tokens=3))
    with pytest.raises(InvalidRequest, match="none of this request's documents is hosted"):
        llm.generate([prompt()], GREEDY, select=FEW, salt="another")
    for family in ("qwen2", "gemma2"):
        with pytest.raises(InvalidRequest, match="sliding windows"):
            make(checkpoint(family, "dynamic")).host(document(0, LONG, context="alone"))
    with pytest.raises(InvalidRequest, match="the context holds"):
        llm.host(document(1, 100_000, context="alone"))


def test_a_fault_while_hosting_ends_that_job_only(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(checkpoint("llama", "dynamic"))

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("looseleaf.engine.documents.hosting.build_segment", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            llm.host(document(0, LONG, context="alone"), index=INDEX)
    assert isinstance(llm.host(document(0, LONG, context="alone"), index=INDEX), HostedSegment)
    params = SamplingParams(max_tokens=2)
    assert llm.generate([prompt()], params, select=FEW)[0].finished
    assert isinstance(document(0), Document)


def test_another_index_is_built_anew_and_the_same_is_kept(checkpoint: Folder) -> None:
    llm = make(checkpoint("llama", "dynamic"))
    first = llm.host(document(0, LONG, context="alone"), index=INDEX)
    assert llm.host(document(0, LONG, context="alone"), index=INDEX) is first
    other = llm.host(document(0, LONG, context="alone"), index=IndexConfig("ivf"))
    assert other.index is not None and other.index.config.kind == "ivf"
    assert llm.engine.hosting.built == 2


def test_an_index_that_learns_from_no_queries_is_built_over_the_keys_that_are_there(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(checkpoint("llama", "dynamic"))
    first = llm.host(document(0, LONG, context="alone"), index=INDEX)
    expected = logits(llm, prompt(), ALL)
    computed = HostedPass.advance
    monkeypatch.setattr(HostedPass, "advance", None)
    other = llm.host(document(0, LONG, context="alone"), index=IndexConfig("ivf"))
    assert other.kv is first.kv and other.index is not first.index
    torch.testing.assert_close(logits(llm, prompt(), ALL), expected, rtol=0, atol=TOLERANCE)
    monkeypatch.setattr(HostedPass, "advance", computed)
    again = llm.host(document(0, LONG, context="alone"), index=INDEX)
    assert again.kv is not first.kv and torch.equal(again.kv, first.kv)


def test_a_registered_hosted_document_is_back_after_a_restart(
    checkpoint: Folder, tmp_path: Path
) -> None:
    text = document(0, LONG, context="alone")

    async def serve() -> tuple[tuple[int, ...], tuple[int, int]]:
        options = {"num_pages": 5, "max_model_len": 1024, "disk_path": str(tmp_path)}
        folder = checkpoint("llama", "dynamic")
        async with AsyncLLM(folder, device="cpu", dtype="float32", **options) as llm:
            states = [
                info
                async for info in llm.register(text, document_id="book", hosted=INDEX)
            ]  # fmt: skip
            last = states[-1]
            assert (last.state, last.hosted, last.num_pages) == ("ready", True, 0)
            assert last.tokens_done == last.num_tokens and last.num_bytes > 0
            parts = ["Read. ", *llm.registered(["book"]), "What stands in it?"]
            async for output in llm.generate(parts, GREEDY, select=FEW):
                answer = output.token_ids
            hosting = llm.engine.hosting
            counts = hosting.loaded, hosting.built
            await llm.delete("book") if hosting.loaded else None
            return answer, counts

    first, counts = asyncio.run(serve())
    assert counts == (0, 1)
    assert asyncio.run(serve()) == (first, (1, 0))
    assert not list((tmp_path / "hosted").glob("*.segment"))


def test_the_same_text_under_two_ids_stays_until_both_are_deleted(checkpoint: Folder) -> None:
    llm = make(checkpoint("llama", "dynamic"))
    text = document(0, LONG, context="alone")
    parts, documents = llm.engine.prompts.from_document(text), llm.engine.documents
    segment = llm.host(text, index=INDEX)
    for name in ("one", "two"):
        assert documents.register(text, parts, name, hosted=INDEX).state == "ready"
    documents.delete("one")
    assert llm.engine.hosting.find(segment.key) is segment
    documents.delete("two")
    assert llm.engine.hosting.find(segment.key) is None


@pytest.mark.parametrize("stage", ["computing", "indexing"])
def test_what_is_deleted_on_its_way_is_nowhere(
    checkpoint: Folder, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, ended = (threading.Event() for _ in range(3))

    def late(vectors: Any, *rest: Any, on_progress: Any, **options: Any) -> Any:
        begun.set()
        go_on.wait()
        try:
            return build_segment(vectors, *rest, on_progress=on_progress, **options)
        finally:
            ended.set()

    monkeypatch.setattr("looseleaf.engine.documents.hosting.build_segment", late)
    text = document(0, LONG, context="alone")
    llm = make(checkpoint("llama", "dynamic"), disk_path=str(tmp_path))
    documents, hosting = llm.engine.documents, llm.engine.hosting
    parts = llm.engine.prompts.from_document(text)
    assert documents.register(text, parts, "it", hosted=INDEX).state == "computing"
    if stage == "indexing":
        while not begun.is_set():
            llm.engine.step()
    documents.delete("it")
    go_on.set()
    if stage == "indexing":
        assert ended.wait(60)
    assert not hosting.has_work
    for thread in threading.enumerate():
        if thread.name == "looseleaf-indexing":
            thread.join(60)
    assert hosting.built == 0
    assert not [path for path in (tmp_path / "hosted").rglob("*") if path.is_file()]
    with pytest.raises(InvalidRequest, match="host it first"):
        llm.generate([[text, "?"]], GREEDY, select=FEW)


def test_hosted_documents_on_disk_keep_to_their_time_and_their_tenants_share(
    checkpoint: Folder, tmp_path: Path
) -> None:
    options = {"disk_path": str(tmp_path), "tier_ttl": 100.0, "disk_gib": 0.1}
    llm = make(checkpoint("llama", "dynamic"), **options, tenant_share=0.5)
    text = document(0, LONG, context="alone")
    llm.host(text, index=INDEX, salt="one")
    tier = llm.engine.hosting.tier
    assert isinstance(tier, DiskTier)
    (entry,) = tier.entries()
    assert entry.tenant == tenant_of("one") != ""
    assert tier.ledger.tenant_share == 0.5
    for path in (tmp_path / "hosted").glob("*.segment"):
        os.utime(path, (time.time() - 200, time.time() - 200))
    later = make(checkpoint("llama", "dynamic"), **options)
    later.host(text, index=INDEX, salt="one")
    assert (later.engine.hosting.loaded, later.engine.hosting.built) == (0, 1)


def test_a_failed_hosting_is_told_to_who_registered(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve() -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("no memory")

        monkeypatch.setattr("looseleaf.engine.documents.hosting.build_segment", broken)
        folder = checkpoint("llama", "dynamic")
        options = {"num_pages": 5, "max_model_len": 1024}
        async with AsyncLLM(folder, device="cpu", dtype="float32", **options) as llm:
            with pytest.raises(EngineFault, match="no memory"):
                async for _ in llm.register(document(0, LONG, context="alone"), hosted=INDEX):
                    pass

    asyncio.run(serve())
