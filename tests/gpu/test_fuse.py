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
