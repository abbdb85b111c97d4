"""Blended answers on a GPU are those of the CPU: every selector, and documents read apart."""

import pytest
import torch

from looseleaf import LLM, Document, Fuse, SamplingParams
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)

FUSES = [
    Fuse("all"),
    Fuse("first", tokens=3),
    Fuse("random", ratio=0.3),
    Fuse("question", ratio=0.3),
    Fuse("links", ratio=0.3),
    # so few that all of them deviate by more than rounding, also where a window is short
    Fuse("deviation", ratio=0.1, check_layers=(1, 2)),
    Fuse("oracle", ratio=0.1),
    Fuse("ape", temperature=0.8, scale=0.7),
]
TEXTS = (
    "Mira Tolland keeps the keys of the archive. ",
    "The archive stands in Quorin, behind the mill. ",
    "She lives there.",
)
PROMPT = ["Notes on a house. ", *(Document(text) for text in TEXTS), "Who keeps the keys?"]


def answers(folder, fuses, **options):
    """One answer for each policy, together with a plain one, and the logprobs of its tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
    llm = LLM(folder, dtype="float32", num_pages=256, **options)
    found = []
    for fuse in fuses:
        (output,) = llm.generate([PROMPT], params, fuse=fuse)
        llm.engine.check()
        found.append(output)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "phi"])
def test_fused_answers_are_those_of_the_cpu(tmp_path, family):
    folder = make_checkpoint(tmp_path, family)
    pairs = zip(
        FUSES,
        answers(folder, FUSES, device="cuda"),
        answers(folder, FUSES, device="cpu"),
        strict=True,
    )
    for fuse, gpu, cpu in pairs:
        assert gpu.token_ids == cpu.token_ids, fuse
        assert [d.recomputed for d in gpu.reuse.documents] == [
            d.recomputed for d in cpu.reuse.documents
        ], fuse
        got, wanted = (
            torch.tensor([entry[0].logprob for entry in output.outputs[0].logprobs])
            for output in (gpu, cpu)
        )
        assert (got - wanted).abs().max() < 1e-3, fuse


def test_passes_replay_what_they_are_without_graphs(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
    fuses = [Fuse(name, ratio=0.3) for name in ("random", "question", "links")]
    fuses += [Fuse("deviation", ratio=0.1, check_layers=some) for some in ((1,), (2,))]
    found = []
    for graphs in (True, False):
        options = {"device": "cuda", "dtype": "float32", "num_pages": 256, "cuda_graphs": graphs}
        llm = LLM(folder, **options)
        # twice, so that graphs meet what they left behind
        found.append([llm.generate([PROMPT], params, fuse=f)[0] for f in [*fuses, *fuses]])
        llm.engine.check()
        passes = llm.engine.runner.passes
        assert (passes is not None) == graphs
        # each policy's own, what shows it its tokens, and scouts
        assert passes is None or passes.replays >= 2 * (5 + 2)
    for one, two in zip(*found, strict=True):
        assert one.token_ids == two.token_ids
        chosen = [[d.recomputed for d in output.reuse.documents] for output in (one, two)]
        assert chosen[0] == chosen[1]
        for a, b in zip(one.outputs[0].logprobs, two.outputs[0].logprobs, strict=True):
            assert abs(a[0].logprob - b[0].logprob) < 1e-4
