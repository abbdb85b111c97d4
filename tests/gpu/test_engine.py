"""The engine on a GPU answers as it does on the CPU, and keeps its laws there."""

import pytest
import torch

from looseleaf import LLM, Document, SamplingParams
from tests.checkpoints import FAMILIES, make_checkpoint

PROMPTS = [
    [
        "Notes on a house. ",
        Document("Mira Tolland keeps the keys of the archive. " * 2, name="keys"),
        Document("The archive stands in Quorin, behind the old mill. ", name="place"),
        "Who keeps the keys?",
    ],
    [
        "Notes on a house. ",
        Document("The archive stands in Quorin, behind the old mill. ", name="place"),
        Document("Mira Tolland keeps the keys of the archive. " * 2, name="keys"),
        "Where does the archive stand?",
    ],
    "A plain prompt, without any document.",
]


def _logprobs(folder, dtype, **options):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    llm = LLM(folder, dtype=dtype, num_pages=128, **options)
    outputs = llm.generate(PROMPTS, params)
    llm.engine.check()
    return [[entry[0] for entry in output.outputs[0].logprobs] for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_answers_and_logprobs_are_those_of_the_cpu(tmp_path, family):
    folder = make_checkpoint(tmp_path, family)
    on_gpu = _logprobs(folder, "float32", device="cuda")
    on_cpu = _logprobs(folder, "float32", device="cpu")
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        assert [entry.token_id for entry in gpu] == [entry.token_id for entry in cpu]
        got = torch.tensor([entry.logprob for entry in gpu])
        wanted = torch.tensor([entry.logprob for entry in cpu])
        assert (got - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_bf16_answers_do_not_depend_on_grouping(tmp_path, page_size):
    folder = make_checkpoint(tmp_path, "llama")
    grouped = _logprobs(folder, "bfloat16", device="cuda", page_size=page_size)
    alone = _logprobs(folder, "bfloat16", device="cuda", page_size=page_size, grouping=False)
    for one, other in zip(grouped, alone, strict=True):
        # the first token of each answer saw the same prompt, whatever came of the ones before
        assert abs(one[0].logprob - other[0].logprob) < 0.1


def test_bf16_documents_are_reused_in_any_order(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    llm = LLM(folder, dtype="bfloat16", device="cuda", num_pages=128)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.generate(PROMPTS[:1], params)
    (second,) = llm.generate(PROMPTS[1:2], params)
    assert second.reuse.document_tokens_computed == 0
    llm.engine.check()
