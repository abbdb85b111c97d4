"""Sampling parameters say what is wrong with them, and mean what vLLM means by them."""

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from jaxtyping import config

from looseleaf import Grammar, SamplingParams
from looseleaf.errors import InvalidOption


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Arguments of wrong types reach the library, as they do outside of tests."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": -1.0}, r"temperature must be 0 \(greedy\) or a positive number, not -1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, not 1.1"),
        ({"top_k": -2}, "top_k must be 0 or -1"),
        ({"min_p": 2.0}, "min_p must be from 0 to 1"),
        ({"presence_penalty": 3.0}, "presence_penalty must be from -2 to 2"),
        ({"frequency_penalty": -3.0}, "frequency_penalty must be from -2 to 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 2, "temperature": 0.0}, "use n=1, or a temperature above 0"),
        ({"max_tokens": -1}, "max_tokens must be 0 or more, not -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be 0 or more, not -1"),
        ({"min_tokens": -1}, "min_tokens must be 0 or more, not -1"),
        ({"min_tokens": 17}, "min_tokens=17 is more than max_tokens=16: raise max_tokens"),
        ({"stop": ""}, "stop must not contain an empty string"),
        ({"stop": ["a", ""]}, "stop must not contain an empty string"),
        ({"logprobs": -1}, "logprobs must be 0 or more, not -1"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number, not 2.5"),
        ({"n": None}, "n must be a whole number, not None"),
        ({"stop": [5]}, "stop must be strings"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias must have values up to"),
        ({"logit_bias": {3: 1e300}}, "logit_bias must have values up to"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias must name tokens by their ids"),
        ({"logit_bias": {3: "a"}}, "logit_bias must have numbers as values"),
        ({"logit_bias": [3]}, "logit_bias is a dict"),
        ({"stop": 3}, "stop is a string or a list"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must name tokens by their ids"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty must be positive"),
        ({"grammar": "json"}, "grammar is a Grammar"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_with_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        SamplingParams(**options)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)
    assert not params.greedy
    assert not params.has_penalties


def test_all_spellings_of_the_same_wish_are_equal() -> None:
    assert SamplingParams(stop="a") == SamplingParams(stop=["a"]) == SamplingParams(stop=("a",))
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    biased = SamplingParams(logit_bias={1: 2.0}, stop_token_ids=[3])
    assert hash(biased) == hash(SamplingParams(logit_bias=[(1, 2.0)], stop_token_ids=(3,)))


FLOATS = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    "repetition_penalty",
)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "half", [Fraction(1, 2), Decimal("0.5"), np.float32(0.5), np.float16(0.5)], ids=repr
)
def test_a_number_of_any_kind_is_the_float_that_it_equals(name: str, half: Any) -> None:
    params = SamplingParams(**{name: half})
    assert type(getattr(params, name)) is float
    assert params == SamplingParams(**{name: 0.5})
    (bias,) = SamplingParams(logit_bias={7: half}).logit_bias
    assert bias == (7, 0.5) and type(bias[1]) is float


@pytest.mark.usefixtures("unchecked")
def test_whole_numbers_of_any_kind_are_ints() -> None:
    names = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs")
    params = SamplingParams(**{name: np.int8(3) for name in names}, stop_token_ids=np.arange(2))
    assert {type(getattr(params, name)) for name in names} == {int}
    assert [type(token) for token in params.stop_token_ids] == [int, int]
    assert type(SamplingParams(temperature=1).temperature) is float


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [True, "0.5", None, 1j, [0.5], np.array([0.5])], ids=repr)
def test_what_is_no_number_is_refused_in_every_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidOption, match=f"{name} must be a number, not"):
        SamplingParams(**{name: value})
    with pytest.raises(InvalidOption, match="logit_bias must have numbers as values"):
        SamplingParams(logit_bias={7: value})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", FLOATS)
def test_a_number_that_no_float_can_hold_is_out_of_range(name: str) -> None:
    for value, shown in ((10**5000, "inf"), (Decimal("sNaN"), "nan"), (Fraction(10**400), "inf")):
        with pytest.raises(InvalidOption, match=f"{name} must be .*, not {shown}$"):
            SamplingParams(**{name: value})
        with pytest.raises(InvalidOption, match="logit_bias must have values up to"):
            SamplingParams(logit_bias={7: value})


def test_a_tiny_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-3).greedy


@pytest.mark.usefixtures("unchecked")
def test_a_grammar_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidOption, match="unknown grammar 'yaml': use json_object"):
        Grammar("yaml")  # type: ignore[arg-type]
