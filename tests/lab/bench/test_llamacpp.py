"""``bench llamacpp``: which cached tokens move, and sentences before anything is measured."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.llamacpp import LlamaCppConfig, measure
from looseleaf_lab.bench.llamacpp.peer import Shift, plan_reuse

A, B, C = ([start + n for n in range(8)] for start in (100, 200, 300))


def moved(cached: list[int], prompt: list[int]) -> list[int]:
    """Cached tokens after all moves, at their new positions."""
    prefix, shifts = plan_reuse(cached, prompt, shortest=4)
    tokens = cached[:prefix]
    for shift in shifts:
        assert shift.target == len(tokens)
        tokens += cached[shift.start : shift.stop]
    return tokens


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        (A + B + C, 24),
        (A + C + B, 16),  # B precedes C in the cache, so it is gone
        (B + C + A, 16),
        (C + B + A, 8),
        ([1, 2, *A], 0),  # nothing moves to a later position without an equal token
        ([*A, 7, *C], 8),
    ],
    ids=str,
)
def test_kept_tokens_are_the_prompts_first(prompt: list[int], kept: int) -> None:
    tokens = moved(A + B + C, prompt)
    assert tokens == prompt[:kept]


def test_several_chunks_move_one_after_the_other() -> None:
    assert moved([*A, 7, *B, 8, *C], B + C) == B + C


def test_short_chunks_do_not_move() -> None:
    assert plan_reuse(A + B[:3], B[:3], shortest=4) == (0, [])
    assert plan_reuse(A + B[:4], B[:4], shortest=4) == (0, [Shift(8, 12, 0)])


def test_a_missing_file_and_package_get_a_sentence(tmp_path: Path) -> None:
    missing = tmp_path / "none.gguf"
    with pytest.raises(InvalidOption, match=f"no GGUF file at {missing}"):
        LlamaCppConfig((missing,))
    if find_spec("llama_cpp") is None:
        with pytest.raises(InvalidOption, match="pip install llama-cpp-python"):
            next(measure(LlamaCppConfig((Path(__file__),))))
