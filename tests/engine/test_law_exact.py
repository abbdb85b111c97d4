"""Laws 2 and 8: what the engine answers is what the model's definition answers.

Law 8 compares with Transformers. So does law 2 where reuse is exact: for the first document,
encoded behind the lead, just as in a prompt. Behind several documents the definition is a dense
pass in which each of them sees the lead and itself.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf.models import Tokenizer
from looseleaf.prompt.builder import PromptBuilder
from looseleaf.prompt.request import Prompt
from tests.checkpoints import VOCAB_SIZE, make_model
from tests.engine.harness import (
    CASES,
    TOLERANCE,
    Folder,
    ask,
    document,
    drawn,
    make_llm,
    words,
    worst,
)
from tests.engine.oracle import dense_logits

EVERY_CASE = pytest.mark.parametrize(("family", "law", "page_size"), CASES)
PARAMS = drawn(5)
LEAD = words(1, 11)
EXACT = [LEAD, document(1, 52), words(2, 9)]
SEVERAL = [
    LEAD,
    document(1, 41),
    document(2, 5),
    words(3, 7),
    document(3, 33, context="alone"),
    document(1, 41),
    words(2, 9),
]


def context_length(folder: Path, prompt: Prompt) -> int:
    """The length at which length-dependent laws are frozen: all that Transformers will see."""
    parts = PromptBuilder(Tokenizer(folder), VOCAB_SIZE).from_parts(prompt)
    return sum(len(part.tokens) for part in parts) + (PARAMS.max_tokens or 0)


def transformers_logits(family: str, law: str, token_ids: list[int], num_rows: int) -> Tensor:
    """The logits behind the last ``num_rows`` tokens, from one full prefill."""
    with torch.inference_mode():
        logits: Any = make_model(family, law)(torch.tensor([token_ids])).logits[0]
    return logits[-num_rows - 1 : -1]


@EVERY_CASE
def test_logits_are_those_of_transformers_in_prefill_chunks_and_decode(
    checkpoint: Folder, family: str, law: str, page_size: int
) -> None:
    """Law 8."""
    prompt = words(4, 75)
    options = {
        "page_size": page_size,
        "max_model_len": context_length(checkpoint(family, law), prompt),
    }
    for chunking in ({}, {"max_num_batched_tokens": 17, "max_num_seqs": 4}):
        llm = make_llm(checkpoint(family, law), **options, **chunking)
        (answer,) = ask(llm, [prompt], PARAMS)
        assert len(answer.all_token_ids) <= options["max_model_len"]
        expected = transformers_logits(family, law, answer.all_token_ids, len(answer.token_ids))
        assert worst(answer.logits, expected) <= TOLERANCE


@EVERY_CASE
def test_a_document_behind_the_lead_is_read_as_if_it_were_part_of_the_prompt(
    checkpoint: Folder, family: str, law: str, page_size: int
) -> None:
    """Law 2, exact case: computed for this request, or by an earlier one that asked otherwise."""
    length = context_length(checkpoint(family, law), EXACT)
    llm = make_llm(checkpoint(family, law), page_size=page_size, max_model_len=length)
    ask(llm, [[*EXACT[:2], "?"]])
    cold = make_llm(checkpoint(family, law), page_size=page_size, max_model_len=length)
    for engine, source in ((cold, "computed"), (llm, "cached")):
        (answer,) = ask(engine, [EXACT], PARAMS)
        assert [d.source for d in answer.output.reuse.documents] == [source]
        expected = transformers_logits(family, law, answer.all_token_ids, len(answer.token_ids))
        assert worst(answer.logits, expected) <= TOLERANCE


@EVERY_CASE
def test_documents_anywhere_are_read_as_the_dense_definition_says(
    checkpoint: Folder, family: str, law: str, page_size: int
) -> None:
    """Law 2: at three offsets, one document twice, one encoded alone, each in its own frame."""
    llm = make_llm(checkpoint(family, law), page_size=page_size, max_model_len=220)
    parts = llm.engine.prompts.from_parts(SEVERAL)
    for prompt in (SEVERAL, [LEAD, *SEVERAL[-3:]], SEVERAL):
        (answer,) = ask(llm, [prompt], PARAMS)
        parts = llm.engine.prompts.from_parts(prompt)
        expected = dense_logits(llm.engine.runner.model, parts, list(answer.token_ids))
        rows = expected[-len(answer.token_ids) - 1 : -1]
        assert worst(answer.logits, rows) <= TOLERANCE
    assert answer.output.reuse.document_tokens_computed == 0


def test_plain_reuse_is_not_full_attention(checkpoint: Folder) -> None:
    """Else the tests above could not tell one from the other."""
    llm = make_llm(checkpoint("llama"))
    (answer,) = ask(llm, [SEVERAL], PARAMS)
    full = transformers_logits("llama", "default", answer.all_token_ids, len(answer.token_ids))
    assert worst(answer.logits, full) > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_documents_in_the_context_of_the_prompt_are_full_attention(
    checkpoint: Folder, family: str
) -> None:
    prompt = [LEAD, *(document(n, 30 + n, context="prompt") for n in range(3)), words(2, 9)]
    (answer,) = ask(make_llm(checkpoint(family)), [prompt], PARAMS)
    full = transformers_logits(family, "default", answer.all_token_ids, len(answer.token_ids))
    assert worst(answer.logits, full) <= TOLERANCE
