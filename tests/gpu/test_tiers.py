"""Documents come back to a GPU's pool from the host's memory and from disk as they were."""

import pytest
import torch
from safetensors.torch import load_file

from looseleaf import LLM, Document, SamplingParams
from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.pool import PagePool
from looseleaf.tiers.transfer.copy_batches import BatchLimits, CopyBatch, CopySchedule
from looseleaf.tiers.transfer.copy_engine import Source
from looseleaf.tiers.transfer.pool_copy import PoolCopy
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)

LETTERS = "abcdefghijklmnopqrstuvwxyz "
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)


def text(seed: int, length: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, len(LETTERS), (length,), generator=generator)
    return "".join(LETTERS[n] for n in drawn.tolist())


DOCUMENTS = [Document(text(seed, 20 + 13 * seed), name=f"d{seed}") for seed in range(4)]
PROMPTS = [[*(DOCUMENTS[(n + k) % 4] for k in range(2)), text(90 + n, 9)] for n in range(5)]


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.engine.check()
    return [output.token_ids for output in outputs]


def loaded_again_and_again(llm, way, turns=20):
    """The answers of documents that were computed, then of the same from a tier, so many times."""
    tiering = llm.engine.tiering
    tiering.controller.compute_time.predict = lambda *_, **__: None
    answers = [tokens(llm)]
    for _ in range(turns):
        # other text takes the pages that were let go of, at once
        assert llm.engine.tiers.flush(60)
        tiering.release_pages()
        llm.engine.store.evict_idle()
        llm.generate([[text(7, 150)]], PARAMS)
        answers.append(tokens(llm))
    counters = llm.engine.tiers.counters[way.split()[0]]
    assert counters.loads >= 3 * turns and not counters.faults
    llm.close()
    return answers


def tier_options(tmp_path, way, dtype):
    options = {"device": "cuda", "dtype": dtype, "num_pages": 48, "staging_gib": 0.01}
    if "host" in way:
        options["host_gib"] = 0.02
    if "disk" in way:
        options["disk_path"] = str(tmp_path / "cache")
    return options


@pytest.mark.parametrize("way", ["host", "disk", "host and disk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_the_same_from_any_tier(tmp_path, way, dtype):
    folder = make_checkpoint(tmp_path / "model", "llama")
    llm = LLM(folder, **tier_options(tmp_path, way, dtype))
    assert not llm.engine.tiers.copy.packs
    right, *others = loaded_again_and_again(llm, way)
    assert all(answers == right for answers in others)


@pytest.mark.parametrize("way", ["host", "disk", "host and disk"])
def test_packed_documents_give_the_answers_of_plain_ones(tmp_path, way):
    folder = make_checkpoint(tmp_path / "model", "llama", head_dim=64)
    found = {}
    for packing in ("off", "auto"):
        options = tier_options(tmp_path / packing, way, "bfloat16")
        llm = LLM(folder, tier_packing=packing, **options)
        assert llm.engine.tiers.copy.packs == (packing == "auto")
        _, *found[packing] = loaded_again_and_again(llm, way, turns=8)
    # of loaded documents: a step that computes some has rows beside, and rounds differently
    assert found["auto"] == found["off"] == found["off"][:1] * 8


def test_what_lies_behind_the_end_of_a_document_is_not_stored(tmp_path):
    folder, disk = make_checkpoint(tmp_path / "model", "llama"), tmp_path / "cache"
    llm = LLM(folder, device="cuda", dtype="float32", num_pages=32, disk_path=str(disk))
    # every page of the pool has been written to
    llm.generate([[text(1, 240)], [text(2, 240)]], PARAMS)
    llm.engine.store.evict_idle()
    (output,) = llm.generate([[DOCUMENTS[1], "what?"]], PARAMS)
    llm.close()
    (path,) = disk.glob("*.segment")
    behind = output.reuse.documents[0].num_tokens % 16
    for array in load_file(path).values():
        assert array[-1, :, :behind].abs().sum() > 0
        assert array[-1, :, behind:].abs().sum() == 0


def test_documents_that_arrive_do_not_break_a_graph_that_is_captured_meanwhile():
    pool = PagePool(
        num_pages=2, page_size=16, num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float32,
        device=torch.device("cuda"),
    )  # fmt: skip
    numbers = torch.zeros(8, device="cuda")
    # as many as there are streams to hand out, and more
    copies = [PoolCopy(pool) for _ in range(40)]
    events = [torch.cuda.Event() for _ in copies]
    for event in events:
        event.record()
    for _ in range(40):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            numbers.add_(1)
            for copy, event in zip(copies, events, strict=True):
                copy._stream.wait_event(event)
        graph.replay()
    torch.cuda.synchronize()
    assert numbers.tolist() == [40.0] * 8


def wide_pool(num_pages):
    pool = PagePool(
        num_pages=num_pages, page_size=16, num_layers=6, num_kv_heads=2, head_dim=64,
        dtype=torch.bfloat16, device=torch.device("cuda"),
    )  # fmt: skip
    pool.kv.normal_()
    return pool


def bring(copy, sources, layers, together):
    """Have a courier bring documents, so many ``together``, some layers at a time."""
    firsts = range(0, len(sources), together)
    batches = [CopyBatch(some, range(n, n + together)) for some in layers for n in firsts]
    schedule = CopySchedule(BatchLimits(0, 0, 1 << 40, None, 0, 1), tuple(batches))
    order = copy.copy_engine.submit(sources, schedule, copy.fence())
    assert order.wait_for_end(30) and not order.failed
    order.event(0, -1).synchronize()
    order.close()


def test_packed_and_plain_documents_come_together_to_runs_of_pages_and_others():
    pool = wide_pool(96)
    copy, before = PoolCopy(pool, "auto"), pool.kv.clone()
    # a distance from layer to layer that copies of plain runs can't take is nothing to packed ones
    near, copy._plane = copy._plane, (1 << 31) + 4096
    assert copy.run_of([3, 4, 5]) is None and copy.run_of([3, 4, 5], packed=True) == range(3, 6)
    copy._plane = near
    # neighbours, one apart, one that is not packed
    documents = [range(3, 9), range(9, 12), range(20, 27), range(30, 32)]
    targets = [range(70, 76), range(76, 79), range(40, 47), range(50, 52)]
    memories = []
    for number, pages in enumerate(documents):
        key = SegmentKey(bytes([number]) * 32)
        record = copy.record(key, 16 * len(pages), len(pages), packed=number < 3)
        assert record.packed == (number < 3)
        memories.append(torch.empty(6, record.layer_bytes, dtype=torch.uint8, pin_memory=True))
        assert copy.read(record, pages, memories[-1]).event is not None
    torch.cuda.synchronize()
    sources = [
        Source(run, memory.data_ptr(), number < 3)
        for number, (run, memory) in enumerate(zip(targets, memories, strict=True))
    ]
    bring(copy, sources, [range(0, 1), range(1, 5), range(5, 6)], 4)
    for pages, run in zip(documents, targets, strict=True):
        assert torch.equal(pool.kv[:, :, list(run)], before[:, :, list(pages)])
    # any pages, from memory that is not pinned
    record = copy.record(SegmentKey(bytes(32)), 16 * 6, 6)
    scattered = [90, 1, 88, 2, 60, 94]
    copy.write_layers(record, 0, scattered, memories[0].clone())
    torch.cuda.synchronize()
    assert torch.equal(pool.kv[:, :, scattered], before[:, :, 3:9])


def test_what_passes_through_the_ring_waits_for_what_stood_there():
    pool = wide_pool(64)
    copy, before = PoolCopy(pool, "auto"), pool.kv.clone()
    record = copy.record(SegmentKey(bytes(32)), 16 * 20, 20)
    memory = torch.empty(6, record.layer_bytes, dtype=torch.uint8, pin_memory=True)
    copy.read(record, range(20), memory)
    torch.cuda.synchronize()
    # many rounds through the ring, and nobody waits between two
    source = Source(range(39, 59), memory.data_ptr(), True)
    bring(copy, [source] * 200, [range(layer, layer + 1) for layer in range(6)], 1)
    assert torch.equal(pool.kv[:, :, 39:59], before[:, :, :20])


def test_documents_that_can_not_be_packed_are_kept_as_they_are_on_a_gpu():
    pool = wide_pool(16)
    pool.kv[4, 1, 2, :, :, ::2] *= 2.0**-40
    copy = PoolCopy(pool, "auto")
    record = copy.record(SegmentKey(bytes(32)), 16 * 4, 4)
    memory = torch.empty(6, record.layer_bytes, dtype=torch.uint8, pin_memory=True)
    copied = copy.read(record, range(4), memory)
    copied.event.synchronize()
    assert not copied.is_valid
    copied = copy.read(record, range(4, 8), memory)
    copied.event.synchronize()
    assert copied.is_valid
