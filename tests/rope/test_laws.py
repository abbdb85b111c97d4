"""Each law's frequencies and attention factor are those of Transformers."""

from typing import Any

import pytest
import torch

from looseleaf.config import RopeConfig
from looseleaf.errors import InvalidOption
from looseleaf.rope import rope_frequencies

ORIGINAL = 64
TRAINED = 512
HEAD_DIM = 32
FRACTIONS = (1.0, 0.5)
LONG = {
    "short_factor": tuple(1.0 + 0.1 * i for i in range(16)),
    "long_factor": tuple(2.0 + 1.5 * i for i in range(16)),
    "original_max_position_embeddings": ORIGINAL,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 8.0, "original_max_position_embeddings": ORIGINAL}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 4.0}),
    ("dynamic", {"factor": 4.0}),
    ("llama3", {**LLAMA3, "original_max_position_embeddings": ORIGINAL}),
    ("yarn", YARN),
    ("yarn", {**YARN, "truncate": False}),
    ("yarn", {**YARN, "attention_factor": 1.3}),
    ("yarn", {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2}),
    ("yarn", {**YARN, "mscale": 0.707}),
    ("yarn", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}),
    ("yarn", {"factor": 0.5, "original_max_position_embeddings": ORIGINAL}),
    ("longrope", LONG),
    ("longrope", {**LONG, "factor": 3.0}),
    ("longrope", {**LONG, "attention_factor": 1.1}),
]


def reference(
    law: str, parameters: dict[str, Any], fraction: float, length: int
) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": law, "rope_theta": 5000.0, "partial_rotary_factor": fraction}
    rope |= {n: list(v) if isinstance(v, tuple) else v for n, v in parameters.items()}
    config = LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=TRAINED, rope_parameters=rope, hidden_size=64
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[law](config, torch.device("cpu"), seq_len=length)
    return inverse, float(factor)


def config_of(
    law: str, parameters: dict[str, Any], fraction: float, length: int | None
) -> RopeConfig:
    half = int(HEAD_DIM * fraction) // 2
    trimmed = {
        name: value[:half] if isinstance(value, tuple) else value
        for name, value in parameters.items()
    }
    if law == "longrope":
        trimmed.setdefault("factor", TRAINED / ORIGINAL)
    return RopeConfig(
        head_dim=HEAD_DIM,
        rotary_dim=2 * half,
        theta=5000.0,
        law=law,  # type: ignore[arg-type]
        max_position_embeddings=TRAINED,
        length=length,
        **trimmed,
    )


@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + 1, TRAINED, TRAINED + 1, 4 * TRAINED])
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize(("law", "parameters"), CASES)
def test_frequencies_and_factor_equal_transformers(
    law: str, parameters: dict[str, Any], fraction: float, length: int
) -> None:
    half = int(HEAD_DIM * fraction) // 2
    cut = {n: v[:half] if isinstance(v, tuple) else v for n, v in parameters.items()}
    inverse, factor = reference(law, cut, fraction, length)
    ours = rope_frequencies(config_of(law, parameters, fraction, length))
    # the reference computes in fp32: a few roundings of 6e-8 each
    torch.testing.assert_close(ours.inverse, inverse.double(), rtol=1e-6, atol=0.0)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


def test_default_frequencies_are_powers_of_theta() -> None:
    inverse = rope_frequencies(config_of("default", {}, 1.0, None)).inverse
    assert inverse[0] == 1.0
    torch.testing.assert_close(
        inverse[1:] / inverse[:-1], torch.full((15,), 5000.0 ** (-1 / 16)).double()
    )


def test_without_a_length_the_model_s_own_limit_is_the_frozen_one() -> None:
    unset, stated = (config_of("longrope", LONG, 1.0, length) for length in (None, TRAINED))
    assert torch.equal(rope_frequencies(unset).inverse, rope_frequencies(stated).inverse)


def test_longrope_refuses_factors_that_do_not_match_the_pairs() -> None:
    bad = config_of("longrope", {**LONG, "long_factor": (1.0, 2.0)}, 1.0, TRAINED)
    with pytest.raises(InvalidOption, match="2 values but the model rotates 16 pairs"):
        rope_frequencies(bad)
