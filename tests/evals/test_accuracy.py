"""Accuracy on held-out worlds, at toy size, with the checkpoint that ships."""

import pytest

from looseleaf import LLM
from looseleaf.engine.loading import reference_model
from looseleaf.evals.accuracy import Accuracy, measure


def test_the_interval_is_wilsons():
    low, high = Accuracy("m", "lookup", None, "lead", 6, 100, 95).interval
    assert (low, high) == (pytest.approx(0.8882, abs=1e-4), pytest.approx(0.9785, abs=1e-4))


def test_the_block_checkpoint_looks_facts_up_in_reused_documents():
    llm = LLM(reference_model("block"))
    found = measure(llm, "block", "lookup", hops=None, context="lead", seeds=range(10))
    assert found.right >= 9


def test_plain_reuse_loses_chains_on_the_causal_checkpoint():
    llm = LLM(reference_model("causal"))
    seeds = range(10)
    whole = measure(llm, "causal", "chain", hops=2, context="prompt", seeds=seeds)
    reused = measure(llm, "causal", "chain", hops=2, context="lead", seeds=seeds)
    assert whole.right >= 9
    assert reused.right <= 4
