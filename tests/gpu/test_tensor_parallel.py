"""Two GPUs answer as one: eager steps, graphs, sums by peer memory, and the loss of a rank."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf import LLM, Fuse, SamplingParams, Select
from looseleaf.errors import EngineFault
from tests.checkpoints import make_checkpoint
from tests.engine.harness import document, words

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROMPTS: list[Any] = [
    words(0, 70),
    [words(1, 20), document(1, 40), document(2, 50), document(3, 30), words(2, 24)],
]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=1)
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "deviation": {"fuse": Fuse("deviation", ratio=0.3)},
    "question": {"fuse": Fuse("question", ratio=0.3)},
    "quest": {"select": Select("quest", tokens=48, dense_layers=())},
}


def scores(llm: LLM, **policies: Any) -> list[list[float]]:
    """The log-probabilities of each output's tokens, twice: eager or captured, then replayed."""
    outputs = [
        *llm.generate(PROMPTS, PARAMS, **policies),
        *llm.generate(PROMPTS, PARAMS, **policies),
    ]
    return [[entry[0].logprob for entry in o.outputs[0].logprobs or ()] for o in outputs]


@pytest.mark.parametrize("all_reduce", ["auto", "nccl"])
@pytest.mark.parametrize("graphs", [True, False])
def test_two_gpus_answer_as_one(tmp_path: Path, all_reduce: str, graphs: bool) -> None:
    options: dict[str, Any] = {"dtype": "float32", "device": "cuda", "num_pages": 96}
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    with LLM(folder, **options) as single:
        expected = {name: scores(single, **policy) for name, policy in POLICIES.items()}
    both = {"tensor_parallel": 2, "all_reduce": all_reduce, "cuda_graphs": graphs}
    with LLM(folder, **options, **both) as llm:
        for name, policy in POLICIES.items():
            for mine, other in zip(scores(llm, **policy), expected[name], strict=True):
                assert mine == pytest.approx(other, abs=2e-3), name


def test_documents_load_to_both_gpus(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "device": "cuda", "num_pages": 96}
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    tiers = {"host_gib": 0.02, "staging_gib": 0.01}
    with LLM(folder, tensor_parallel=2, **tiers, **options) as llm:
        first = scores(llm)
        link = llm.engine.ranks.link  # type: ignore[union-attr]
        for path in ("tiers.flush", "tiering.release_pages", "store.evict_idle"):
            with link.command(path):
                owner, _, name = path.partition(".")
                getattr(getattr(llm.engine, owner), name)()
        again = scores(llm)
    for mine, other in zip(again, first, strict=True):
        assert mine == pytest.approx(other, abs=2e-3)


@pytest.mark.parametrize("all_reduce", ["auto", "nccl"])
def test_a_gpu_that_is_lost_ends_the_engine(all_reduce: str) -> None:
    with LLM(device="cuda", tensor_parallel=2, num_pages=256, all_reduce=all_reduce) as llm:
        ranks = llm.engine.ranks
        assert ranks is not None and ranks.processes is not None
        stream = llm.stream(words(1, 20), SamplingParams(max_tokens=2000, ignore_eos=True))
        next(stream)
        os.kill(ranks.processes.pids[0], signal.SIGKILL)
        with pytest.raises(EngineFault):
            for _ in stream:
                pass
        with pytest.raises(EngineFault):
            llm.generate(words(1, 20), PARAMS)


@pytest.mark.parametrize("codes", ["fp8", "int4"])
def test_quantized_matrices_are_split(codes: str) -> None:
    from looseleaf_lab.bench.tensor_parallel import RanksConfig, measure

    config = RanksConfig(
        "llama-3.1-8b", (2,), codes, (1,), prefill_tokens=300, document_tokens=100,  # type: ignore[arg-type]
        steps=4, repetitions=1, memory_gib=2.0,
    )  # fmt: skip
    rows = list(measure(config, torch.device("cuda")))
    bits = {"fp8": 8, "int4": 4}[codes]
    # layers' matrices, and the head of 16 bits
    layers = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336) * bits / 8
    expected = (layers + 2 * 128_256 * 4096) / 2 / 2**30
    assert float(rows[0]["weight_gib"]) == pytest.approx(expected, rel=0.1)
