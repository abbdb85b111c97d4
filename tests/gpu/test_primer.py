"""Answers behind a primer, and forced answers under a selection, are those of the CPU."""

import pytest
import torch

from looseleaf import LLM, Document, Fuse, SamplingParams, Select
from looseleaf.config import PolicyFile
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_model
from looseleaf_lab.evals.distance.forced import decoded_distributions
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)

PRIMER = ("The north wing has a clock of its own. ", "Boats pass the mill in spring. ")
DOCUMENTS = [
    Document("Mira Tolland keeps the keys of the archive. "),
    Document("The archive stands in Quorin, behind the mill. "),
]
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)


def scores(folder, device, policy):
    """Scores of the question behind documents in both orders, without and with blending."""
    llm = LLM(folder, dtype="float32", num_pages=256, device=device, policy=str(policy))
    values = []
    for fuse in (Fuse("none"), Fuse("question", ratio=0.3), Fuse("deviation", ratio=0.3)):
        for documents in (DOCUMENTS, DOCUMENTS[::-1]):
            prompt = ["Notes on a house. ", *documents, "Who keeps the keys?"]
            (output,) = llm.generate([prompt], SCORED, fuse=fuse)
            values += [entry[0].logprob for entry in output.prompt_logprobs if entry is not None]
    llm.engine.check()
    return values


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_scores_behind_a_primer_are_those_of_the_cpu(tmp_path, family):
    folder, policy = make_checkpoint(tmp_path / family, family), tmp_path / "policy.json"
    shape = load_model(folder, make_config({"device": "cpu", "dtype": "float32"})).shape
    PolicyFile.of(shape, None, PRIMER).write(policy)
    own, expected = scores(folder, "cuda", policy), scores(folder, "cpu", policy)
    assert own == pytest.approx(expected, abs=2e-3)


def test_rows_of_a_forced_answer_are_those_of_the_cpu(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    select = Select("quest", tokens=32, dense_layers=(), dense_below=0)
    rows = []
    for device in ("cuda", "cpu"):
        llm = LLM(folder, dtype="float32", num_pages=256, device=device)
        parts = llm.engine.prompts.from_parts(["abcdefgh " * 20])
        answer = llm.engine.tokenizer.encode("Mira Tolland")
        for policy in (None, select):
            own, progress = decoded_distributions(
                llm.engine, f"forced {policy}", parts, answer, policy
            )
            assert progress.outputs[0].answer[1:] == tuple(answer)
            rows.append(own)
    assert torch.allclose(rows[0], rows[2], atol=2e-3)
    assert torch.allclose(rows[1], rows[3], atol=2e-3)
