"""Laws 3 and 6: an answer depends on its request alone, whoever shares the engine with it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from looseleaf import LLM
from tests.checkpoints import ATTENTION_FAMILIES, ROPE_LAWS
from tests.engine.harness import (
    Answer,
    Folder,
    ask,
    ask_in_turn,
    assert_same_answers,
    document,
    drawn,
    make_llm,
    words,
)

EVERY_CASE = pytest.mark.parametrize(
    ("family", "law", "page_size"),
    [
        *((family, "default", 16) for family in ATTENTION_FAMILIES),
        *(
            ("llama", law, size)
            for law, size in zip(ROPE_LAWS[1:], (16, 32, 64, 16, 32), strict=True)
        ),
    ],
)
EVERY_FAMILY = pytest.mark.parametrize(
    ("family", "page_size"),
    [*((family, 16) for family in ATTENTION_FAMILIES), ("llama", 32), ("llama", 64)],
)
LEAD = words(1, 19)
A, B, C = document(1, 37), document(2, 18), document(3, 50)
PROMPTS = [
    [LEAD, A, B, words(11, 9)],
    [LEAD, B, A, words(12, 5)],
    [LEAD, C, words(13, 6), A, words(14, 4)],
    [LEAD + words(2, 5), A, words(15, 8)],
    [LEAD, A, words(16, 40)],
    [A, words(17, 7)],
    LEAD + words(18, 30),
    LEAD + words(18, 30) + words(19, 3),
    # the same pages of text, first behind nothing, then behind a document
    words(21, 90),
    [LEAD, B, words(21, 90)],
    # a page in common with the first of those, then pages of its own
    words(21, 90)[:20] + words(22, 50),
]
PARAMS = [drawn(seed, max_tokens=8) for seed in range(len(PROMPTS))]
Baseline = Callable[[str, int], list[Answer]]


def one_at_a_time(llm: LLM) -> list[Answer]:
    """Each request with the engine and an empty cache to itself."""
    answers = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        llm.engine.store.evict_idle()
        answers += ask(llm, [prompt], params)
    return answers


@pytest.fixture(scope="module")
def baseline(checkpoint: Folder) -> Baseline:
    @cache
    def answers(family: str, page_size: int) -> list[Answer]:
        return one_at_a_time(make_llm(checkpoint(family), page_size=page_size))

    return answers


@EVERY_CASE
def test_grouping_changes_nothing(
    checkpoint: Folder, family: str, law: str, page_size: int
) -> None:
    """Law 3, for rows that read the same document at different offsets."""
    answers = {}
    for grouping in (True, False):
        options = {"page_size": page_size, "grouping": grouping, "max_model_len": 200}
        llm = make_llm(checkpoint(family, law), **options)
        answers[grouping] = ask(llm, PROMPTS, PARAMS)
        assert (llm.engine.runner.attention.counters.grouped_rows > 0) == grouping
    assert_same_answers(answers[True], answers[False])


@EVERY_FAMILY
def test_an_answer_does_not_depend_on_batch_mates_or_their_order(
    checkpoint: Folder, baseline: Baseline, family: str, page_size: int
) -> None:
    """Law 6."""
    llm = make_llm(checkpoint(family), page_size=page_size)
    assert_same_answers(ask(llm, PROMPTS, PARAMS), baseline(family, page_size))
    llm.engine.store.evict_idle()
    backwards = ask(llm, PROMPTS[::-1], PARAMS[::-1])
    assert_same_answers(backwards[::-1], baseline(family, page_size))


@EVERY_FAMILY
def test_an_answer_does_not_depend_on_cache_history(
    checkpoint: Folder, baseline: Baseline, family: str, page_size: int
) -> None:
    """Law 6: warm from a batch in another order, from its own first run, without prefix caching."""
    llm = make_llm(checkpoint(family), page_size=page_size)
    ask(llm, PROMPTS[::-1])
    for _ in range(2):
        warm = ask(llm, PROMPTS, PARAMS)
        assert_same_answers(warm, baseline(family, page_size))
        assert all(a.output.reuse.document_tokens_computed == 0 for a in warm)
    assert page_size > 16 or warm[-1].output.reuse.text_tokens_cached > 0
    plain = make_llm(checkpoint(family), page_size=page_size, prefix_caching=False)
    assert_same_answers(ask(plain, PROMPTS, PARAMS), baseline(family, page_size))
    assert all(a.output.reuse.text_tokens_cached == 0 for a in ask(plain, PROMPTS, PARAMS))


def test_an_answer_does_not_depend_on_who_comes_and_goes_beside_it(checkpoint: Folder) -> None:
    """Law 6: two rows that begin alike share pages; a third takes the place of one of them."""
    prompts = [words(1, 40), words(1, 35) + words(2, 9), words(3, 45)]
    params = [drawn(0, max_tokens=4), drawn(1, max_tokens=9), drawn(2, max_tokens=9)]
    llm = make_llm(checkpoint())
    expected = [ask(llm, [p], one)[0] for p, one in zip(prompts, params, strict=True)]
    for third in range(2, 7):
        arrivals = [(third * (n == 2), prompts[n], params[n]) for n in range(3)]
        assert_same_answers(ask_in_turn(llm, arrivals), expected)
    assert llm.engine.runner.attention.counters.grouped_rows > 0


@EVERY_FAMILY
def test_an_answer_does_not_depend_on_the_size_of_chunks(
    checkpoint: Folder, baseline: Baseline, family: str, page_size: int
) -> None:
    """Law 6."""
    steps = []
    for budget in (7, 40):
        options: dict[str, Any] = {"max_num_batched_tokens": budget, "max_num_seqs": 5}
        llm = make_llm(checkpoint(family), page_size=page_size, **options)
        assert_same_answers(ask(llm, PROMPTS, PARAMS), baseline(family, page_size))
        steps.append(llm.engine.counters.steps)
    assert steps[0] > steps[1]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_an_answer_does_not_depend_on_preemption(
    checkpoint: Folder, family: str, prefix_caching: bool
) -> None:
    """Law 6, in a pool that holds the prompts of a few requests, but not their outputs."""
    prompts = [[LEAD, A, words(20 + n, 12)] for n in range(6)]
    params = [drawn(seed, max_tokens=40) for seed in range(6)]
    roomy = make_llm(checkpoint(family), num_pages=200, prefix_caching=prefix_caching)
    tiny = make_llm(checkpoint(family), num_pages=15, prefix_caching=prefix_caching)
    mine = ask(tiny, prompts, params)
    assert tiny.engine.counters.preemptions > 0
    assert any(a.output.reuse.preempted_tokens for a in mine)
    assert_same_answers(mine, ask(roomy, prompts, params))
    assert roomy.engine.counters.preemptions == 0
