"""Tokens are drawn as the options define, whatever else is in the batch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from looseleaf import SamplingParams
from looseleaf.engine.sampling.sampler import (
    Sampler,
    min_p_threshold,
    top_k_threshold,
    top_p_threshold,
)
from looseleaf.engine.sampling.state import SamplingBatch, SamplingState, uniform
from looseleaf.errors import InvalidRequest

VOCAB = 50


def random_logits(rows: int = 1, *, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def state(*, vocab: int = VOCAB, prompt: tuple[int, ...] = (1, 2), **options: Any) -> SamplingState:
    own = {name: options.pop(name) for name in ("child", "eos_token_ids") if name in options}
    own["output_token_ids"] = options.pop("output", ())
    params = SamplingParams(**{"max_tokens": None, **options})
    return SamplingState(params, prompt, vocab_size=vocab, **own)


def sample(logits: Tensor, *states: SamplingState, sampler: Sampler | None = None) -> list[int]:
    """The tokens of one step."""
    batch = SamplingBatch(states)
    return (sampler or Sampler()).sample(logits, batch).token_ids.tolist()


def frequencies(logits: Tensor, draws: int = 4000, **options: Any) -> Tensor:
    """How often each token of one row of logits is drawn, by as many requests as draws."""
    states = [state(vocab=logits.shape[-1], seed=i, **options) for i in range(draws)]
    tokens = sample(logits.expand(draws, -1), *states)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / draws


def agrees(observed: Tensor, probabilities: Tensor, draws: int = 4000) -> bool:
    """Whether chi-square is within five deviations of its mean and nothing impossible drawn."""
    possible = probabilities > 0
    if observed[~possible].any():
        return False
    expected = probabilities[possible]
    chi_square = draws * ((observed[possible] - expected).square() / expected).sum()
    freedom = int(possible.sum()) - 1
    return bool(chi_square <= freedom + 5 * (2 * freedom) ** 0.5)


# greedy


@given(st.integers(0, 1000), st.integers(1, 5))
def test_greedy_is_the_argmax(seed: int, rows: int) -> None:
    logits = random_logits(rows, seed=seed)
    states = [state(temperature=0.0) for _ in range(rows)]
    assert SamplingBatch(states).plain_greedy
    assert sample(logits, *states) == logits.argmax(-1).tolist()


def test_greedy_rows_of_a_mixed_batch_are_the_argmax() -> None:
    logits = random_logits(4)
    states = [state(temperature=t) for t in (0.0, 1.0, 0.0, 2.0)]
    tokens = sample(logits, *states)
    assert [tokens[0], tokens[2]] == [logits[0].argmax(), logits[2].argmax()]


def test_a_temperature_near_zero_draws_the_argmax() -> None:
    logits = random_logits(64)
    states = [state(temperature=1e-4, seed=i) for i in range(64)]
    assert sample(logits, *states) == logits.argmax(-1).tolist()


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, state(top_p=0.5, presence_penalty=1.0), state(temperature=0.0))
    assert torch.equal(logits, before)


# filters: each against its definition, token by token


@given(st.integers(0, 1000), st.floats(0.01, 1.0))
def test_min_p_keeps_tokens_a_share_as_likely_as_the_likeliest(seed: int, min_p: float) -> None:
    logits = random_logits(seed=seed)
    kept = logits >= min_p_threshold(logits, torch.tensor([[min_p]]))
    ratio = logits.double().softmax(-1) / logits.double().softmax(-1).max()
    assert kept[ratio > min_p * (1 + 1e-5)].all()
    assert not kept[ratio < min_p * (1 - 1e-5)].any()
    assert kept.any()


@given(st.integers(0, 1000), st.integers(1, 2 * VOCAB), st.booleans())
def test_top_k_keeps_the_k_likeliest_and_their_equals(seed: int, k: int, ties: bool) -> None:
    logits = random_logits(seed=seed)
    if ties:
        logits = logits.round()
    kept = logits >= top_k_threshold(logits, torch.tensor([[k]]))
    assert kept.sum() >= min(k, VOCAB)
    likelier = (logits[0][:, None] < logits[0]).sum(-1)
    assert torch.equal(kept[0], likelier < k)


@given(st.integers(0, 1000), st.floats(0.01, 0.999), st.integers(1, VOCAB), st.booleans())
def test_top_p_keeps_the_likeliest_tokens_that_reach_p(
    seed: int, p: float, num_candidates: int, ties: bool
) -> None:
    logits = random_logits(seed=seed)
    if ties:
        logits = logits.round()
    kept = (logits >= top_p_threshold(logits, torch.tensor([[p]]), num_candidates))[0]
    probabilities = logits[0].double().softmax(-1)
    likelier = (probabilities * (logits[0][:, None] < logits[0])).sum(-1)
    assert kept[likelier < p - 1e-5].all()
    assert not kept[likelier > p + 1e-5].any()
    assert probabilities[kept].sum() >= p - 1e-5


def test_filters_do_not_look_at_other_rows() -> None:
    logits = random_logits(3)
    top_p = torch.tensor([[0.1], [0.5], [0.95]])
    together = top_p_threshold(logits, top_p, 8)
    alone = [top_p_threshold(logits[i : i + 1], top_p[i : i + 1], 8) for i in range(3)]
    assert torch.equal(together, torch.cat(alone))


# draws


def test_tokens_are_drawn_as_often_as_the_model_says() -> None:
    logits = random_logits(vocab=12)
    assert agrees(frequencies(logits), logits[0].softmax(-1))


def test_temperature_divides_the_logits() -> None:
    logits = random_logits(vocab=12)
    observed = frequencies(logits, temperature=2.5)
    assert agrees(observed, (logits[0] / 2.5).softmax(-1))
    assert not agrees(observed, logits[0].softmax(-1))


@pytest.mark.parametrize(
    "options",
    [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.8, "temperature": 3.0}],
    ids=str,
)
def test_filters_draw_from_what_they_keep(options: dict[str, Any]) -> None:
    """Against the filters written out: temperature, min-p, top-k, then top-p of what is left."""
    logits = random_logits(vocab=12)
    scaled = logits[0] / options.get("temperature", 1.0)
    order = scaled.argsort(descending=True)
    kept = scaled[order].softmax(-1)
    kept = kept * (kept >= options.get("min_p", 0.0) * kept[0])
    kept[options.get("top_k", 12) :] = 0.0
    kept = kept / kept.sum()
    kept = kept * (kept.cumsum(-1) - kept < options.get("top_p", 1.0))
    expected = torch.zeros(12).scatter(0, order, kept / kept.sum())
    assert agrees(frequencies(logits, **options), expected)


def test_draws_are_uniform_and_differ_by_seed_child_and_step() -> None:
    drawn = [uniform(s, c, t) for s in range(20) for c in range(10) for t in range(20)]
    assert len(set(drawn)) == len(drawn)
    assert all(0.0 <= u < 1.0 for u in drawn)
    counts = torch.histc(torch.tensor(drawn), bins=20, min=0.0, max=1.0)
    assert agrees(counts / 4000, torch.full((20,), 0.05))


def test_a_seeded_output_does_not_depend_on_its_batch() -> None:
    options = {"seed": 11, "temperature": 1.3, "top_p": 0.9}
    steps = [random_logits(seed=i) for i in range(20)]
    alone = state(**options)
    expected = [sample(logits, alone)[0] for logits in steps]

    crowded, tokens = state(**options), []
    for i, logits in enumerate(steps):
        mates = [state(seed=100 + j, top_k=j, temperature=j / 2) for j in range(i % 5)]
        position = i % (len(mates) + 1)
        rows = random_logits(len(mates) + 1, seed=500 + i)
        rows[position] = logits
        tokens.append(sample(rows, *mates[:position], crowded, *mates[position:])[position])
    assert tokens == expected


def test_a_preempted_output_goes_on_as_if_nothing_had_happened() -> None:
    options = {"seed": 5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    steps = [random_logits(seed=i) for i in range(12)]
    whole = state(**options)
    expected = [sample(logits, whole)[0] for logits in steps]
    resumed = state(output=tuple(expected[:6]), **options)
    assert [sample(logits, resumed)[0] for logits in steps[6:]] == expected[6:]


def test_children_of_a_seeded_request_differ_and_repeat() -> None:
    def outputs() -> list[list[int]]:
        children = [state(seed=3, n=4, child=i) for i in range(4)]
        return [sample(torch.zeros(4, VOCAB), *children) for _ in range(8)]

    assert outputs() == outputs()
    assert len(set(zip(*outputs(), strict=True))) == 4


def test_a_batch_may_be_kept_while_its_rows_stay() -> None:
    kept = [state(seed=i, presence_penalty=1.0) for i in range(3)]
    fresh = [state(seed=i, presence_penalty=1.0) for i in range(3)]
    batch, sampler = SamplingBatch(kept), Sampler()
    for step in range(5):
        logits = random_logits(3, seed=step)
        assert sampler.sample(logits, batch).token_ids.tolist() == sample(logits, *fresh)


# what changes the logits


def test_penalties_follow_their_definition() -> None:
    logits = random_logits(vocab=8)
    options = {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.7}
    penalized = state(vocab=8, prompt=(0, 1, 1), output=(1, 2, 2, 2), **options).penalized(
        logits[0]
    )
    for token, (in_prompt, count) in enumerate([(1, 0), (1, 1), (0, 3)] + 5 * [(0, 0)]):
        expected = float(logits[0, token])
        if in_prompt or count:
            expected = expected / 1.5 if expected > 0 else expected * 1.5
        expected -= 0.3 * count + 0.7 * (count > 0)
        assert float(penalized[token]) == pytest.approx(expected, rel=1e-6)


def test_penalties_count_tokens_as_they_are_drawn() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 3], logits[0, 1] = 1.0, 0.9
    greedy = state(vocab=4, prompt=(), temperature=0.0, frequency_penalty=0.2)
    assert [sample(logits, greedy)[0] for _ in range(5)] == [3, 1, 3, 1, 3]


def test_penalties_hold_in_every_row_of_a_mixed_batch() -> None:
    logits = torch.zeros(3, 4)
    logits[:, 0] = 5.0
    logits[:, 1] = 4.0
    penalized = {"temperature": 0.0, "repetition_penalty": 3.0}
    rows = [
        state(vocab=4, prompt=(0,), temperature=0.0),
        *(state(vocab=4, prompt=(token,), **penalized) for token in (0, 1)),
    ]
    assert sample(logits, *rows) == [0, 1, 0]


def test_logit_bias_is_added_and_forbids() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 1.0
    forced, forbidden = {9: 2.0}, {7: -float("inf")}
    rows = [state(temperature=0.0, logit_bias=bias) for bias in (forced, forbidden, {9: 0.5})]
    assert sample(logits, *rows) == [9, 0, 7]
    assert frequencies(logits[:1], 200, logit_bias={7: -float("inf")})[7] == 0


def test_before_min_tokens_no_end_is_drawn() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 9], logits[0, 5] = 30.0, 20.0, 10.0
    for temperature in (0.0, 0.5):
        row = state(
            temperature=temperature, min_tokens=3, eos_token_ids=(2,), stop_token_ids=[9], seed=0
        )
        assert [sample(logits, row)[0] for _ in range(4)] == [5, 5, 5, 2]


def test_a_token_the_model_lacks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias names token 50, .* 0 to 49"):
        state(logit_bias={VOCAB: 1.0})
    with pytest.raises(InvalidRequest, match="stop_token_ids names token -1"):
        state(stop_token_ids=[-1])


# log-probabilities


@given(st.integers(0, 1000), st.integers(0, VOCAB))
def test_logprobs_are_those_of_the_model(seed: int, k: int) -> None:
    logits = random_logits(3, seed=seed)
    options = {"logprobs": k, "temperature": 2.0, "presence_penalty": 1.0, "top_k": 5}
    sampled = Sampler().sample(logits, SamplingBatch([state(), state(seed=1, **options), state()]))
    assert list(sampled.logprobs) == [1]
    drawn, *others = sampled.logprobs[1]
    model = logits[1].log_softmax(-1)
    order = model.argsort(descending=True).tolist()
    assert drawn.token_id == sampled.token_ids[1]
    assert [t.token_id for t in others] == [t for t in order[:k] if t != drawn.token_id]
    for token in (drawn, *others):
        assert token.logprob == pytest.approx(float(model[token.token_id]), abs=1e-6)
        assert token.rank == order.index(token.token_id) + 1


def test_logprobs_of_all_tokens_sum_to_one() -> None:
    batch = SamplingBatch([state(temperature=0.0, logprobs=VOCAB)])
    tokens = Sampler().sample(random_logits(), batch).logprobs[0]
    assert len({token.token_id for token in tokens}) == len(tokens) == VOCAB
    assert sum(torch.tensor(token.logprob).exp() for token in tokens) == pytest.approx(1.0, 1e-5)


def test_low_precision_logits_are_sampled_in_fp32() -> None:
    logits = random_logits(4).to(torch.bfloat16)
    options = {"top_p": 0.8, "frequency_penalty": 0.1}
    rows = [[state(seed=i, **options) for i in range(4)] for _ in range(2)]
    assert sample(logits, *rows[0]) == sample(logits.float(), *rows[1])
