"""Documents come back to a GPU's pool from the host's memory and from disk as they were."""

import pytest
import torch
from safetensors.torch import load_file

from looseleaf import LLM, Document, SamplingParams
from looseleaf.kv.pool import PagePool
from looseleaf.tiers.pool_copy import PoolCopy
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


@pytest.mark.parametrize("way", ["host", "disk", "host and disk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_the_same_from_any_tier(tmp_path, way, dtype):
    folder = make_checkpoint(tmp_path / "model", "llama")
    options = {"device": "cuda", "dtype": dtype, "num_pages": 48, "staging_gib": 0.01}
    if "host" in way:
        options["host_gib"] = 0.02
    if "disk" in way:
        options["disk_path"] = str(tmp_path / "cache")
    llm = LLM(folder, **options)
    tiering = llm.engine.tiering
    tiering.controller.pace.predict = lambda *_, **__: None
    right = tokens(llm)
    for _ in range(20):
        # other text takes the pages that were let go of, at once
        assert llm.engine.tiers.flush(60)
        tiering.release_pages()
        llm.engine.store.evict_idle()
        llm.generate([[text(7, 150)]], PARAMS)
        assert tokens(llm) == right
    counters = llm.engine.tiers.counters[way.split()[0]]
    assert counters.loads >= 60 and not counters.faults
    llm.close()


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
    events = [copy.fence() for copy in copies]
    for _ in range(40):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            numbers.add_(1)
            for copy, event in zip(copies, events, strict=True):
                copy._stream.wait_event(event)
        graph.replay()
    torch.cuda.synchronize()
    assert numbers.tolist() == [40.0] * 8
