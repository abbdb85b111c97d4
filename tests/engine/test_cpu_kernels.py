"""On the CPU, decode rows go through C or through PyTorch: the answers are the same, the choice is
the user's, and without a compiler the engine says that it goes on without C."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from looseleaf import SamplingParams
from looseleaf.attention.cpu_step import _NativeStep
from looseleaf.config import CacheConfig, EngineConfig
from looseleaf.errors import InvalidOption, NativeUnavailable
from looseleaf.models import Decoder
from looseleaf.ops.dense.product_chain import ProductChain
from looseleaf.ops.native import native_build
from looseleaf.prompt.request import DocumentPart, Request, TextPart
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.bench.random_model import random_engine, random_weights
from tests.engine.harness import Folder, ask, document, drawn, make_llm, words

PROMPTS: list[Any] = [
    [words(1, 11), document(1, 41), document(2, 17), words(2, 9)],
    [words(1, 11), document(2, 17), document(1, 41), words(3, 5)],
    [words(5, 70)],
]


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "phi", "gemma2", "glm4", "granite", "olmo2"]
)
def test_c_and_torch_give_the_same_answers(checkpoint: Folder, family: str) -> None:
    folder, params = checkpoint(family, "default"), drawn(24)
    native = make_llm(folder, cpu_kernels="native")
    plain = make_llm(folder, cpu_kernels="torch")
    for one, other in zip(
        native.generate(PROMPTS, params), plain.generate(PROMPTS, params), strict=True
    ):
        assert one.token_ids == other.token_ids


def test_without_a_compiler_the_engine_answers_and_says_so(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint("llama", "default")
    expected = ask(make_llm(folder), PROMPTS[:1], drawn(8))[0].token_ids
    # what was compiled for this shape before must not be found
    native_build.load_library.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        llm = make_llm(folder)
    assert "no C compiler (no-such-compiler)" in caplog.text
    assert ask(llm, PROMPTS[:1], drawn(8))[0].token_ids == expected
    with pytest.raises(NativeUnavailable, match="install gcc or clang"):
        make_llm(folder, cpu_kernels="native")


def test_a_step_in_one_call_equals_one_call_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, for requests that share a document and differ in length."""
    cpu, calls, run = torch.device("cpu"), _NativeStep.calls, ProductChain.run_layers
    shape = replace(model_shape("tiny"), hidden_size=256, num_qo_heads=16)
    weights = random_weights(shape, torch.float32, cpu, "Q8_0")
    settings = EngineConfig(device="cpu", max_model_len=512, cache=CacheConfig(num_pages=128))
    shared = DocumentPart(tuple(range(40)), 0, "shared")
    params = SamplingParams(max_tokens=12, logprobs=0)
    single: list[int] = []

    def counted(*args: Any) -> int:
        single.append(1)
        return run(*args)

    monkeypatch.setattr(ProductChain, "run_layers", counted)
    scores, numbers = [], []
    for way in (calls, lambda *_: None):
        monkeypatch.setattr(_NativeStep, "calls", way)
        engine = random_engine("tiny", settings, cpu, Decoder(shape, weights))
        progress = [
            engine.add(Request(str(n), (TextPart((n,)), shared, TextPart((n,) * 9 * n)), params))
            for n in range(1, 4)
        ]
        while engine.has_work:
            engine.step()
        outputs = [each.outputs[0] for each in progress]
        scores.append([(each.token_ids, each.logprobs) for each in outputs])
        numbers.append(len(single))
        engine.close()
    assert scores[0] == scores[1]
    assert numbers[0] >= 11 and numbers[1] == numbers[0]


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(InvalidOption, match="use auto, native or torch"):
        EngineConfig(cpu_kernels="fast")  # type: ignore[arg-type]
