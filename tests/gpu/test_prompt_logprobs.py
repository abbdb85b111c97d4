"""Prompt scores on a GPU are those of the CPU, also in steps with decoding outputs and graphs."""

import pytest
import torch

from looseleaf import LLM, Document, Fuse, SamplingParams
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)

PROMPT = [
    "Notes on a house. ",
    Document("Mira Tolland keeps the keys of the archive. "),
    Document("The archive stands in Quorin, behind the mill. "),
    "Who keeps the keys?",
]
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=2)
PLAIN = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def scores(output):
    return [None if entry is None else entry[0].logprob for entry in output.prompt_logprobs]


def runs(folder, device):
    """Scores alone, scores beside decoding outputs, and scores under a policy."""
    llm = LLM(folder, dtype="float32", num_pages=256, device=device)
    (alone,) = llm.generate([PROMPT], SCORED)
    mixed = llm.generate([["A long text."], PROMPT, ["Another one."]], [PLAIN, SCORED, PLAIN])
    (fused,) = llm.generate([PROMPT], SCORED, fuse=Fuse("question", ratio=0.3))
    (score,) = llm.score([PROMPT], [" Mira Tolland."], fuse="all")
    llm.engine.check()
    assert [len(output.token_ids) for output in mixed] == [24, 0, 24]
    return [scores(alone), scores(mixed[1]), scores(fused), [*score.logprobs]]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scores_are_those_of_the_cpu(tmp_path, family):
    folder = make_checkpoint(tmp_path, family)
    for own, expected in zip(runs(folder, "cuda"), runs(folder, "cpu"), strict=True):
        pairs = [
            (a, b) for a, b in zip(own, expected, strict=True) if a is not None or b is not None
        ]
        assert all(a == pytest.approx(b, abs=2e-3) for a, b in pairs)
