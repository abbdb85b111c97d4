"""Real GGUF checkpoints answer, with the values of Transformers and from documents."""

import math
from pathlib import Path

import pytest

from looseleaf import LLM, Document, SamplingParams
from tests.real.conftest import files

PROMPT = "The capital of France is Paris, and the capital of Germany is"
# greedy tokens of Transformers 5.24 in fp32, from the dequantized weights of the same file
GREEDY = " Berlin.\n\nThe United States has a population of approximately"


def test_smollm2_continues_a_text_as_transformers_does(smollm2: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = LLM(smollm2, dtype="float32", max_model_len=512)
    assert llm.generate([PROMPT], params)[0].text == GREEDY


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_documents_are_read_again_in_another_order(path: Path) -> None:
    llm = LLM(path, max_model_len=1024)
    documents = [
        Document("The archive is in the north wing of the house.\n"),
        Document("The budget meeting is on Tuesday at 10:30.\n"),
    ]
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=1)
    question = "Question: When is the budget meeting?\nAnswer: The budget meeting is on"
    first = llm.generate([[*documents, question]], params)[0]
    again = llm.generate([[*documents[::-1], question]], params)[0]
    assert "Tuesday" in first.text and "Tuesday" in again.text
    assert again.reuse.document_tokens_computed == 0
    (entries,) = [output.logprobs for output in again.outputs]
    assert entries and all(math.isfinite(token[0].logprob) for token in entries)
