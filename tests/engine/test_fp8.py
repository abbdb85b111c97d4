"""Keys and values of eight bits: the engine's laws hold, and no cache mixes them with others."""

from typing import Any

import pytest
import torch

from looseleaf.config import CacheConfig, EngineConfig
from looseleaf.errors import InvalidOption
from looseleaf.kv.keys import KeySpace
from looseleaf.llm.load import load_engine
from tests.engine.harness import TOLERANCE, Folder, ask, document, drawn, make_llm, words, worst

PROMPTS = [
    [words(1, 11), document(1, 41), document(2, 17), words(2, 9)],
    [words(1, 11), document(2, 17), document(1, 41), words(3, 5)],
]
PARAMS = drawn(6)


@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
def test_reuse_in_another_order_is_as_if_nothing_had_been_cached(
    checkpoint: Folder, cpu_kernels: str
) -> None:
    folder = checkpoint("llama", "default")
    options = {"kv_dtype": "fp8", "cpu_kernels": cpu_kernels}
    llm = make_llm(folder, **options)
    ask(llm, PROMPTS[:1], PARAMS)
    (reused,) = ask(llm, PROMPTS[1:], PARAMS)
    (fresh,) = ask(make_llm(folder, **options), PROMPTS[1:], PARAMS)
    assert reused.output.reuse.document_tokens_computed == 0
    assert reused.token_ids == fresh.token_ids
    assert worst(reused.logits, fresh.logits) <= TOLERANCE


def test_grouping_changes_nothing_and_neither_do_c_kernels(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3", "default")
    answers = [
        ask(make_llm(folder, kv_dtype="fp8", **options), PROMPTS, PARAMS)
        for options in ({}, {"grouping": False}, {"cpu_kernels": "torch"})
    ]
    for others in answers[1:]:
        for one, other in zip(answers[0], others, strict=True):
            assert one.token_ids == other.token_ids
            # a last bit of a key that is rounded to eight decides which of two it becomes
            assert worst(one.logits, other.logits) <= 100 * TOLERANCE


def test_eight_bits_change_logits_a_little_and_are_a_quarter_of_the_memory(
    checkpoint: Folder,
) -> None:
    folder = checkpoint("llama", "default")
    narrow, wide = make_llm(folder, kv_dtype="fp8"), make_llm(folder)
    assert 4 * narrow.engine.runner.pool.bytes_per_page == wide.engine.runner.pool.bytes_per_page
    (one,), (other,) = ask(narrow, PROMPTS[:1], PARAMS), ask(wide, PROMPTS[:1], PARAMS)
    error = worst(one.logits[:1], other.logits[:1])
    assert TOLERANCE < error < 0.1 * float(other.logits.abs().max())


def test_memory_that_is_asked_for_holds_more_pages(checkpoint: Folder) -> None:
    folder = checkpoint("llama", "default")
    pools = []
    for kv_dtype in ("auto", "fp8"):
        cache = CacheConfig(memory_gib=0.001, kv_dtype=kv_dtype)  # type: ignore[arg-type]
        config = EngineConfig(device="cpu", dtype="float32", cache=cache)
        pools.append(load_engine(folder, config).runner.pool)
    assert pools[0].kv.dtype is torch.float32
    assert pools[1].num_pages // pools[0].num_pages == 4


def test_a_key_names_the_dtypes_that_are_stored_and_computed(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, roots = KeySpace.create, []

    def watched(**parts: Any) -> KeySpace:
        roots.append(create(**parts).root)
        return create(**parts)

    monkeypatch.setattr(KeySpace, "create", watched)
    for kv_dtype in ("auto", "fp8", "fp8"):
        make_llm(checkpoint("llama", "default"), kv_dtype=kv_dtype)
    assert roots[1] == roots[2] != roots[0]
    make_llm(checkpoint("llama", "default"), kv_dtype="fp8", dtype="bfloat16")
    assert roots[3] not in roots[:3]


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidOption, match="use auto or fp8"):
        CacheConfig(kv_dtype="int4")  # type: ignore[arg-type]
