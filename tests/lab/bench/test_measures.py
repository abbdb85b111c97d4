"""The benchmarks measure what they say, at toy size."""

import pytest

from looseleaf.llm.load import reference_model
from looseleaf_lab.bench import generate, reuse
from looseleaf_lab.evals.world import make_example

EXAMPLES = [make_example("lookup", seed) for seed in range(8)]
QUESTIONS = [example.question for example in EXAMPLES]


def test_the_closed_form_is_the_share_of_the_most_popular():
    assert reuse.closed_form(10, 10, 1.1) == pytest.approx(1.0)
    assert reuse.closed_form(4, 1, 1.0) == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4))
    assert reuse.closed_form(100, 5, 2.1) > reuse.closed_form(100, 5, 1.1)


def test_documents_are_reused_at_any_position_where_prefixes_are_not():
    config = reuse.ReuseConfig(
        reference_model(),
        "reference",
        documents=4,
        per_request=3,
        capacity=4,
        requests=8,
        skipped=4,
    )
    texts = ["\n".join(example.documents[:1]) for example in EXAMPLES[:4]]
    documents, prefixes = reuse.measure(config, texts, QUESTIONS)
    assert documents["tokens_reused"] == 1.0
    assert prefixes["tokens_reused"] < 1.0


def test_decode_and_first_token_are_measured_beside_transformers():
    config = generate.GenerateConfig(
        reference_model(), "reference", 50, 20, batches=(1, 2), new_tokens=3, repetitions=1
    )
    text = "\n".join(document for example in EXAMPLES for document in example.documents)
    rows = list(generate.measure(config, generate.Material(text, tuple(QUESTIONS))))
    assert [row["unit"] for row in rows] == ["tokens/s"] * 4 + ["ms"]
    assert all(row["looseleaf"] > 0 and row["transformers"] > 0 for row in rows)
    # five documents of 20 tokens and their markers, a question, a first token
    assert all(row["longest_prompt"] <= 160 for row in rows)
