"""Latent attention in an engine: pages without values, tiers, e4m3, hosted documents, selection.

The laws that all families share are in ``test_law_*.py``, ``test_fuse.py`` and ``test_ape.py``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf.config import IndexConfig, Select
from tests.engine.harness import GREEDY, TOLERANCE, ask, document, make_llm, words, worst
from tests.engine.tiered import forget_pool, load_always, tiered

Folder = Callable[..., Path]
LONG = 150
INDEX = IndexConfig("graph", sink=4, local=12, degree=8, top=20)


def prompt() -> list[Any]:
    return [words(1, 20), document(1, 70), document(2, 50), words(2, 12)]


def test_a_page_has_one_vector_a_token_and_layer(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint("deepseek_v3"))
    pool, latent = llm.engine.runner.pool, llm.engine.runner.model.config.latent
    assert latent is not None
    assert pool.bytes_per_page == 3 * pool.page_size * (latent.rank + latent.rope_dim) * 4
    keys, values = pool.layer(1)
    assert keys.data_ptr() == values.data_ptr()


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_documents_come_back_from_a_tier_with_the_same_logits(
    checkpoint: Folder, tmp_path: Path, place: str, kernels: str
) -> None:
    tier = {"host": {"host_gib": 0.01}, "disk": {"disk": tmp_path}}[place]
    llm = tiered(checkpoint("deepseek_v3"), cpu_kernels=kernels, **tier)
    load_always(llm)
    (first,) = ask(llm, [prompt()])
    forget_pool(llm)
    (again,) = ask(llm, [prompt()])
    assert [d.tier for d in again.output.reuse.documents] == [place] * 2
    assert worst(again.logits, first.logits) <= TOLERANCE
    llm.close()


def test_pages_in_e4m3_answer_nearly_as_those_in_fp32(checkpoint: Folder) -> None:
    exact, narrow = (
        ask(make_llm(checkpoint("deepseek_v3"), kv_dtype=kind), [prompt()])[0].logits[0]
        for kind in ("auto", "fp8")
    )
    error = (narrow - exact).norm() / exact.norm()
    assert 0 < float(error) < 0.15


@pytest.mark.parametrize("policy", ["quest", "partial", "representatives"])
def test_selection_with_a_full_budget_is_dense_decode(checkpoint: Folder, policy: str) -> None:
    llm = make_llm(checkpoint("deepseek_v3"))
    recorder: Any = llm.engine.runner
    answers = []
    for select in (None, Select(policy, tokens=4096, dense_below=0)):  # type: ignore[arg-type]
        recorder.logits.clear()
        llm.generate([prompt()], GREEDY, select=select)
        (rows,) = recorder.logits.values()
        answers.append(torch.stack(rows))
    assert worst(*answers) <= TOLERANCE


def test_a_hosted_document_read_in_full_is_the_document_in_the_pool(checkpoint: Folder) -> None:
    text = document(0, LONG, context="alone")
    parts = ["Read this. ", text, "What stands in it?"]
    llm = make_llm(checkpoint("deepseek_v3"))
    (expected,) = ask(llm, [parts])
    llm.host(text, index=INDEX)
    recorder: Any = llm.engine.runner
    recorder.logits.clear()
    llm.generate([parts], GREEDY, select=Select("retrieval", ratio=1.0))
    (rows,) = recorder.logits.values()
    assert worst(torch.stack(rows), expected.logits) <= TOLERANCE
