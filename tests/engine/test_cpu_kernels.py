"""On the CPU, decode rows go through C or through PyTorch: the answers are the same, the choice is
the user's, and without a compiler the engine says that it goes on without C."""

import logging
from typing import Any

import pytest

from looseleaf.config import EngineConfig
from looseleaf.errors import InvalidOption, NativeUnavailable
from looseleaf.ops.native import native_build
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
    torch = make_llm(folder, cpu_kernels="torch")
    for one, other in zip(
        native.generate(PROMPTS, params), torch.generate(PROMPTS, params), strict=True
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


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(InvalidOption, match="use auto, native or torch"):
        EngineConfig(cpu_kernels="fast")  # type: ignore[arg-type]
