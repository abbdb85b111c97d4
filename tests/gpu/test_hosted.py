"""Hosted documents read by a CUDA device: beside dense decoding, and beside the CPU's engine."""

import gc
import weakref
from typing import Any

import pytest
import torch

from looseleaf import LLM, Document, SamplingParams
from looseleaf.config import IndexConfig, Select

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
TEXT = Document(
    "The seal of Orlen Gate is anchor. Nothing else was noted on that day. " * 40, context="alone"
)
ALL = Select("retrieval", ratio=1.0)
FEW = Select("retrieval", tokens=160)


def prompt(before: str = "Read this. ") -> list[Any]:
    return [before, TEXT, "What is the seal of Orlen Gate?"]


def make(device: str, **options: Any) -> LLM:
    return LLM(dtype="float32", device=device, **{"num_pages": 256, **options})


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", ["flat", "ivf", "graph"])
def test_a_full_budget_equals_dense_decode(kind: str, graphs: bool) -> None:
    llm = make("cuda", cuda_graphs=graphs)
    prompts = [prompt(), prompt("A longer beginning than that. "), "The seal of Orlen"]
    dense = [llm.generate([one], GREEDY)[0].token_ids for one in prompts]
    llm.host(TEXT, index=IndexConfig(kind))  # type: ignore[arg-type]
    read = [llm.generate([one], GREEDY, select=ALL)[0].token_ids for one in prompts[:2]]
    assert read == dense[:2]
    both = llm.generate(prompts[:2], GREEDY, select=ALL)
    assert [o.token_ids for o in both] == dense[:2]
    hosted = llm.engine.runner.attention.hosted
    assert hosted is not None
    hosted.settle()  # type: ignore[union-attr]
    assert hosted.counters.share_read == 1.0


@pytest.mark.parametrize(
    "index", [IndexConfig("flat"), IndexConfig("ivf", estimate=True)], ids=["", "estimate"]
)
def test_few_keys_are_read_as_the_cpu_reads_them(index: IndexConfig) -> None:
    answers, shares = [], []
    for device in ("cpu", "cuda"):
        llm = make(device)
        llm.host(TEXT, index=index)
        answers.append(llm.generate([prompt(), prompt("Well. ")], GREEDY, select=FEW))
        hosted = llm.engine.runner.attention.hosted
        assert hosted is not None
        if device == "cuda":
            hosted.settle()  # type: ignore[union-attr]
        shares.append((hosted.counters.keys_read, hosted.counters.keys))
    assert [o.token_ids for o in answers[0]] == [o.token_ids for o in answers[1]]
    # the GPU's engine may have run a step ahead
    assert shares[0][0] / shares[0][1] == pytest.approx(shares[1][0] / shares[1][1], rel=1e-3)


def test_a_document_longer_than_the_pool_is_answered() -> None:
    big, small = make("cuda"), make("cuda", num_pages=8, max_num_batched_tokens=64)
    expected = big.generate([prompt()], GREEDY)[0].token_ids
    small.host(TEXT, index=IndexConfig("graph"))
    assert small.generate([prompt()], GREEDY, select=ALL)[0].token_ids == expected
    small.engine.check()
    (key,) = small.engine.hosting._segments
    assert small.engine.hosting.forget(key)
    again = small.host(TEXT, index=IndexConfig("flat"))
    assert again.index is not None and again.index.config.kind == "flat"
    assert small.generate([prompt()], GREEDY, select=ALL)[0].token_ids == expected


def test_rows_with_and_without_hosted_documents_share_a_step() -> None:
    llm = make("cuda")
    llm.host(TEXT, index=IndexConfig("flat"))
    alone = [llm.generate([prompt()], GREEDY, select=FEW)[0].token_ids]
    alone += [llm.generate(["The seal"], GREEDY)[0].token_ids]
    from looseleaf.prompt.request import Request

    engine, added = llm.engine, []
    for number, (text, select) in enumerate(((prompt(), FEW), ("The seal", None))):
        parts = engine.prompts.from_parts(text)
        added.append(engine.add(Request(f"mixed-{number}", parts, GREEDY, select=select)))
    while engine.has_work:
        engine.step()
    assert [one.outputs[0].token_ids for one in added] == [list(a) for a in alone]


def test_what_a_step_reads_and_writes_is_there_until_it_has() -> None:
    llm = make("cuda")
    llm.host(TEXT, index=IndexConfig("flat"))
    llm.generate([prompt()], GREEDY, select=ALL)
    hosted = llm.engine.runner.attention.hosted
    stream, idle = torch.cuda.current_stream(), []
    for work in hosted._works.values():  # type: ignore[union-attr]
        weakref.finalize(work.host, lambda: idle.append(stream.query()))
    # a step that takes its time, and an engine that nobody holds any more
    torch.cuda._sleep(200_000_000)
    del llm, hosted, work
    gc.collect()
    # what its end was told of is collected behind it
    gc.collect()
    assert idle and all(idle)
