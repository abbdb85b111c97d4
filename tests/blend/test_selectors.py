"""What every selector promises: a budget kept, order, and choices that batch mates can't change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from looseleaf.blend import (
    Budget,
    Candidates,
    Deviation,
    Everything,
    FirstK,
    Links,
    Nothing,
    Oracle,
    Question,
    RandomTokens,
    Selector,
    choose,
    kv_deviation,
)
from looseleaf.errors import InvalidOption

BUDGET = Budget(ratio=0.25)
SELECTORS: tuple[Selector, ...] = (
    Nothing(),
    Everything(),
    FirstK(3),
    RandomTokens(BUDGET),
    Deviation(BUDGET),
    Question(BUDGET),
    Links(BUDGET),
    Oracle(BUDGET),
)
BY_SCORE: tuple[Selector, ...] = tuple(s for s in SELECTORS if s.evidence != "none")
layouts = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=4
)  # tokens of each document of each request


def name(selector: object) -> str:
    return type(selector).__name__


def scene(layout: list[list[int]], seed: int = 0) -> tuple[Candidates, Tensor]:
    """Candidates of requests whose documents have these lengths, with scores, some equal."""
    positions = [torch.arange(sum(documents)) + 5 for documents in layout]
    numbers = [
        torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)) + 1
        for documents in layout
    ]
    lengths = tuple(sum(documents) for documents in layout)
    random = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 12, (sum(lengths),), generator=random).float() / 4
    return Candidates(torch.cat(positions), torch.cat(numbers), lengths), scores


def counts_of(chosen: Tensor, candidates: Candidates) -> list[int]:
    counts = candidates.requests[chosen].bincount(minlength=len(candidates.lengths))
    return list(map(int, counts))


@pytest.mark.parametrize(
    "selector",
    [Everything(), FirstK(3), FirstK(share=0.4), RandomTokens(BUDGET)],
    ids=repr,
)
@given(layout=layouts)
def test_how_many_are_chosen_without_evidence_is_known_by_lengths_alone(
    selector: Selector, layout: list[list[int]]
) -> None:
    # of a document without a token nobody knows that it is there
    for documents in filter(None, ([n for n in some if n] for some in layout)):
        candidates, scores = scene([documents])
        assert len(selector.select(candidates, scores)) == selector.count(documents)


@pytest.mark.parametrize("selector", SELECTORS, ids=name)
@given(layout=layouts)
def test_chosen_tokens_are_distinct_and_ascend(selector: Selector, layout: list[list[int]]) -> None:
    candidates, scores = scene(layout)
    chosen = selector.select(candidates, scores)
    assert chosen.dtype == torch.long
    assert (chosen.diff() > 0).all()
    assert ((chosen >= 0) & (chosen < len(candidates))).all()


@pytest.mark.parametrize("selector", SELECTORS, ids=name)
@given(layout=layouts)
def test_batch_mates_change_no_choice(selector: Selector, layout: list[list[int]]) -> None:
    candidates, scores = scene(layout)
    together = selector.select(candidates, scores)
    alone, start = [], 0
    for documents in layout:
        mine, _ = scene([documents])
        stop = start + len(mine)
        alone.append(selector.select(mine, scores[start:stop]) + start)
        start = stop
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=0)


@given(layout=layouts, ratio=st.floats(0, 1))
def test_a_ratio_gives_each_request_its_share_rounded_down(
    layout: list[list[int]], ratio: float
) -> None:
    candidates, scores = scene(layout)
    chosen = choose(scores, candidates, Budget(ratio=ratio))
    assert counts_of(chosen, candidates) == [int(ratio * n + 1e-9) for n in candidates.lengths]


@given(layout=layouts, tokens=st.integers(0, 40))
def test_a_number_of_tokens_is_kept_and_used(layout: list[list[int]], tokens: int) -> None:
    candidates, scores = scene(layout)
    chosen = choose(scores, candidates, Budget(tokens=tokens))
    assert counts_of(chosen, candidates) == [min(tokens, n) for n in candidates.lengths]


@given(layout=layouts, tokens=st.integers(0, 40))
def test_no_token_left_out_scores_higher_than_one_chosen(
    layout: list[list[int]], tokens: int
) -> None:
    candidates, scores = scene(layout)
    chosen = choose(scores, candidates, Budget(tokens=tokens))
    taken = torch.zeros(len(candidates), dtype=torch.bool)
    taken[chosen] = True
    for request in range(len(layout)):
        mine = candidates.requests == request
        worst = scores[mine & taken].amin() if (mine & taken).any() else torch.inf
        assert not (scores[mine & ~taken] > worst).any()


def test_of_equal_scores_the_earlier_token_is_chosen() -> None:
    candidates, _ = scene([[4, 4], [6]])
    chosen = choose(torch.ones(14), candidates, Budget(tokens=3))
    assert chosen.tolist() == [0, 1, 2, 8, 9, 10]


def test_a_score_that_is_no_number_is_the_lowest_alone_and_with_batch_mates() -> None:
    scores = torch.tensor([torch.nan, 2.0, -torch.inf, 1.0])
    one, _ = scene([[4]])
    assert choose(scores, one, Budget(tokens=2)).tolist() == [1, 3]
    two, _ = scene([[4], [4]])
    assert choose(scores.repeat(2), two, Budget(tokens=2)).tolist() == [1, 3, 5, 7]


@given(layout=layouts, threshold=st.floats(0, 3))
def test_a_threshold_chooses_what_is_above_it(layout: list[list[int]], threshold: float) -> None:
    candidates, scores = scene(layout)
    chosen = choose(scores, candidates, Budget(threshold=threshold))
    assert chosen.tolist() == [i for i, s in enumerate(scores.tolist()) if s > threshold]


@pytest.mark.parametrize("selector", BY_SCORE, ids=name)
def test_a_ratio_of_one_chooses_everything(selector: Selector) -> None:
    whole = type(selector)(Budget(ratio=1.0))  # type: ignore[call-arg]
    candidates, scores = scene([[7, 0, 4], [1], [9, 9]])
    chosen = whole.select(candidates, scores)
    torch.testing.assert_close(chosen, torch.arange(len(candidates)))


@pytest.mark.parametrize("selector", BY_SCORE, ids=name)
def test_a_ratio_of_zero_chooses_nothing(selector: Selector) -> None:
    nothing = type(selector)(Budget(ratio=0.0))  # type: ignore[call-arg]
    candidates, scores = scene([[7, 0, 4], [1], [9, 9]])
    assert not len(nothing.select(candidates, scores))


def test_all_and_none_are_the_ends() -> None:
    candidates, scores = scene([[7, 0, 4], [1]])
    assert Everything().select(candidates, scores).tolist() == list(range(12))
    assert Nothing().select(candidates, scores).tolist() == []


@given(layout=layouts, k=st.integers(0, 12))
def test_first_k_takes_the_beginning_of_all_documents(layout: list[list[int]], k: int) -> None:
    candidates, scores = scene(layout)
    expected, start = [], 0
    for documents in layout:
        for length in documents:
            expected += range(start, start + min(k, length))
            start += length
    assert FirstK(k).select(candidates, scores).tolist() == expected


def test_random_tokens_follow_their_seed() -> None:
    candidates, scores = scene([[40, 60]])
    first, again, other = (
        RandomTokens(BUDGET, seed).select(candidates, scores).tolist() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@given(seed=st.integers(0, 99))
def test_random_tokens_prefer_no_place(seed: int) -> None:
    candidates, scores = scene([[2000]])
    chosen = RandomTokens(BUDGET, seed).select(candidates, scores).float()
    # the mean of 500 of 2,000 places has a standard error of 22: five of them
    assert abs(float(chosen.mean()) - 999.5) < 112


def vectors(tokens: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, tokens, 2, 8, generator=torch.Generator().manual_seed(seed))
    return keys, values


def test_what_did_not_change_has_deviation_zero_and_passes_no_threshold() -> None:
    keys, values = vectors()
    deviation = kv_deviation(keys, values, keys, values)
    assert (deviation == 0).all()
    candidates, _ = scene([[9, 11]])
    assert not len(Deviation(Budget(threshold=0.0)).select(candidates, deviation))


def test_a_token_deviates_if_and_only_if_its_keys_or_values_changed() -> None:
    keys, values = vectors()
    fresh_keys, fresh_values = keys.clone(), values.clone()
    fresh_keys[3, 1] += 0.5
    fresh_values[7, 0] -= 0.5
    deviation = kv_deviation(fresh_keys, fresh_values, keys, values)
    assert deviation.nonzero()[:, 0].tolist() == [3, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@given(seed=st.integers(0, 99))
def test_what_was_rounded_otherwise_does_not_deviate(dtype: torch.dtype, seed: int) -> None:
    stored = [x.to(dtype) for x in vectors(seed=seed)]
    random = torch.Generator().manual_seed(seed + 1)
    # one step of the numbers up or down, as sums in another order differ
    steps = [torch.randint(-1, 2, x.shape, generator=random) for x in stored]
    fresh = [
        torch.where(
            step > 0,
            torch.nextafter(x, 4 + 0 * x),
            torch.where(step < 0, torch.nextafter(x, -4 + 0 * x), x),
        )
        for x, step in zip(stored, steps, strict=True)
    ]
    deviation = kv_deviation(*fresh, *stored)
    assert (deviation == 0).all()
    candidates, _ = scene([[9, 11]])
    chosen = Deviation(Budget(tokens=6)).select(candidates, deviation)
    assert chosen.tolist() == list(range(6))


@pytest.mark.parametrize(
    ("dtype", "least"),
    [(torch.float32, 2.0**-15), (torch.float16, 2.0**-8), (torch.bfloat16, 2.0**-5)],
)
def test_what_is_more_than_rounded_deviates_by_as_much_as_it_changed(
    dtype: torch.dtype, least: float
) -> None:
    # powers of two change by this factor without being rounded themselves
    stored = [torch.exp2(x.round()).to(dtype) for x in vectors()]
    for change in (least, 2 * least, 0.5, 2.0):
        fresh = [x * (1 + change) for x in stored]
        expected = torch.full((20,), 2 * change)
        torch.testing.assert_close(kv_deviation(*fresh, *stored), expected)


def test_deviation_is_relative_so_the_size_of_keys_does_not_matter() -> None:
    stored, fresh = vectors(), vectors(seed=1)
    plain = kv_deviation(*fresh, *stored)
    scaled = kv_deviation(1024 * fresh[0], fresh[1], 1024 * stored[0], stored[1])
    torch.testing.assert_close(plain, scaled)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Budget(),
        lambda: Budget(ratio=0.1, tokens=3),
        lambda: Budget(ratio=1.1),
        lambda: Budget(tokens=-1),
        lambda: FirstK(-1),
        lambda: RandomTokens(Budget(threshold=0.5)),
        lambda: Deviation(BUDGET, ()),
        lambda: Deviation(BUDGET, (0,)),
        lambda: Deviation(BUDGET, (2, 1)),
        lambda: Deviation(BUDGET, (1, 2), (1.0,)),
        lambda: Deviation(BUDGET, (1, 2), (1.0, 1.5)),
        lambda: Question(BUDGET, 0.0),
        lambda: Links(Budget(threshold=0.5)),
        lambda: Candidates(torch.arange(3), torch.arange(3), (2,)),
    ],
)
def test_an_option_without_meaning_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidOption):
        make()
