"""Two ranks answer as one: the same tokens from the same logits, up to rounding."""

from collections.abc import Callable
from pathlib import Path

import pytest

from looseleaf import LLM
from tests.checkpoints import FAMILIES
from tests.engine.conftest import *  # noqa: F403
from tests.engine.harness import GREEDY, ask, assert_same_answers, document, drawn, make_llm, words
from tests.parallel.pair import Pair

Folder = Callable[..., Path]
JOINT = ("olmo2",)


def plain(llm: LLM) -> list:
    """Prompts with and without documents, in one step and then again from the cache."""
    prompts = [words(0, 70), [words(1, 20), document(1), document(2, 50), words(2, 20)], words(3, 9)]
    params = [GREEDY, GREEDY, drawn(5, temperature=0.8, top_p=0.9)]
    return [*ask(llm, prompts, params), *ask(llm, prompts, params)]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in JOINT])
def test_two_ranks_answer_as_one(checkpoint: Folder, family: str) -> None:
    folder = checkpoint(family)
    one = make_llm(folder)
    with Pair(folder) as pair:
        assert_same_answers(plain(pair.llm), plain(one))
    one.close()
