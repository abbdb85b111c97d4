"""The frame identity, the table, and the name of what changes a stored key."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from looseleaf.config import ModelConfig, RopeConfig
from looseleaf.errors import InvalidOption
from looseleaf.rope import (
    build_rotation,
    frames,
    query_scale,
    rope_fingerprint,
    rope_frequencies,
    softmax_scale,
)

HEAD_DIM = 16
LAWS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "length": 900},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "longrope": {
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "short_factor": (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7),
        "long_factor": (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
    },
}
LAYOUTS = {"halves": (16, False), "interleaved": (16, True), "partial": (8, False)}


def make(law: str, layout: str = "halves", **changes: Any) -> RopeConfig:
    rotary_dim, interleaved = LAYOUTS[layout]
    given_fields = {
        name: value[: rotary_dim // 2] if isinstance(value, tuple) else value
        for name, value in {**LAWS[law], **changes}.items()
    }
    return RopeConfig(
        head_dim=HEAD_DIM,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        law=law,  # type: ignore[arg-type]
        max_position_embeddings=512,
        **given_fields,
    )


def model(rope: RopeConfig, **changes: Any) -> ModelConfig:
    """The least of a model that has this RoPE."""
    counts = {"num_layers": 1, "num_qo_heads": 1, "num_kv_heads": 1, "head_dim": HEAD_DIM}
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    return ModelConfig(
        "llama", rope=rope, max_position_embeddings=512, **counts, **sizes, **changes
    )


def turn(x: Tensor, position: int, config: RopeConfig) -> Tensor:
    """``x`` at ``position`` as complex numbers, fp64: the definition, not the product's code."""
    body, rest = x[: config.rotary_dim], x[config.rotary_dim :]
    pairs = body.view(-1, 2) if config.interleaved else body.view(2, -1).T
    angles = position * rope_frequencies(config).inverse
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    return torch.cat((turned.flatten() if config.interleaved else turned.T.flatten(), rest))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("law", LAWS)
@given(data=st.data())
def test_a_key_read_in_its_frame_scores_as_at_its_true_position(
    law: str, layout: str, data: st.DataObject
) -> None:
    config = make(law, layout)
    offset, inside = data.draw(st.integers(0, 4000)), data.draw(st.integers(0, 4000))
    position = offset + inside + data.draw(st.integers(0, 4000))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    q, k = torch.randn(2, HEAD_DIM, dtype=torch.float64, generator=generator)
    true = turn(q, position, config) @ turn(k, offset + inside, config)
    framed = turn(q, position - offset, config) @ turn(k, inside, config)
    # angles up to 12,000 rad carry 1e-12 of rounding, and a score sums 16 products of size up to 10
    assert abs(true - framed) < 1e-10


@pytest.mark.parametrize("law", LAWS)
def test_the_table_holds_unscaled_cosines_of_fp64_angles(law: str) -> None:
    config = make(law)
    rotation = build_rotation(config, 5000)
    angles = torch.arange(5000, dtype=torch.float64)[:, None] * rope_frequencies(config).inverse
    assert rotation.cos.dtype == rotation.sin.dtype == torch.float32
    assert torch.equal(rotation.cos, angles.cos().float())
    assert torch.equal(rotation.sin, angles.sin().float())
    assert rotation.rotary_dim == config.rotary_dim


def test_the_attention_factor_is_squared_into_the_softmax_scale() -> None:
    yarn = make("yarn", attention_factor=1.5)
    assert softmax_scale(model(make("default"))) == HEAD_DIM**-0.5
    assert softmax_scale(model(yarn)) == pytest.approx(HEAD_DIM**-0.5 * 2.25)
    assert softmax_scale(model(yarn, softmax_scale=0.4)) == pytest.approx(0.4 * 2.25)


def test_dims_that_pass_through_are_relieved_of_the_attention_factor() -> None:
    assert query_scale(make("yarn")) is None
    assert query_scale(make("default", "partial")) is None
    scale = query_scale(make("yarn", "partial", attention_factor=2.0))
    assert scale is not None
    assert scale.tolist() == [1.0] * 8 + [0.25] * 8


@pytest.mark.parametrize(
    ("law", "change"),
    [
        ("default", {"theta": 9999.0}),
        ("linear", {"factor": 5.0}),
        ("llama3", {"low_freq_factor": 2.0}),
        ("llama3", {"high_freq_factor": 5.0}),
        ("llama3", {"original_max_position_embeddings": 65}),
        ("yarn", {"beta_fast": 16.0}),
        ("yarn", {"truncate": False}),
        ("yarn", {"attention_factor": 1.5}),
        ("yarn", {"mscale": 0.5, "mscale_all_dim": 1.0}),
        ("dynamic", {"length": 901}),
        ("dynamic", {"length": 512}),
        ("longrope", {"length": 64}),
        ("longrope", {"long_factor": (3.0,) * 8}),
        ("longrope", {"attention_factor": 1.5}),
    ],
)
def test_what_changes_a_key_changes_the_fingerprint(law: str, change: dict[str, Any]) -> None:
    assert rope_fingerprint(make(law)) != rope_fingerprint(make(law, **change))


def test_layouts_and_laws_have_fingerprints_of_their_own() -> None:
    all_of_them = {rope_fingerprint(make(law, layout)) for law in LAWS for layout in LAYOUTS}
    assert len(all_of_them) == len(LAWS) * len(LAYOUTS)


@pytest.mark.parametrize(
    ("law", "one", "other"),
    [
        ("default", 100, 900),
        ("yarn", 100, 900),
        ("dynamic", 100, 512),
        ("longrope", 10, 64),
        ("longrope", 65, 4000),
    ],
)
def test_a_length_that_changes_no_key_leaves_the_fingerprint(
    law: str, one: int, other: int
) -> None:
    assert rope_fingerprint(make(law, length=one)) == rope_fingerprint(make(law, length=other))


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    assert rope_fingerprint(make("llama3")).hex() == "a3c3107338e33056b3b2c3439b2cfd41"


def test_a_table_needs_a_position() -> None:
    with pytest.raises(InvalidOption, match="at least one position"):
        build_rotation(make("default"), 0)


def test_rotary_dim_must_be_even() -> None:
    with pytest.raises(InvalidOption, match="even"):
        dataclasses.replace(make("default"), rotary_dim=7)


class LargestDouble(TorchDispatchMode):
    """How many numbers the largest tensor of fp64 has that was made meanwhile."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float64:
            self.numbers = max(self.numbers, made.numel())
        return made


@pytest.mark.parametrize("num_positions", [1, frames._POSITIONS, 2 * frames._POSITIONS + 7])
def test_a_long_table_is_made_in_parts_and_the_same_to_the_bit(num_positions: int) -> None:
    config = make("yarn")
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None]
    angles = angles * rope_frequencies(config).inverse
    with LargestDouble() as largest:
        table = build_rotation(config, num_positions)
    assert torch.equal(table.cos, angles.cos().float())
    assert torch.equal(table.sin, angles.sin().float())
    assert largest.numbers <= frames._POSITIONS * HEAD_DIM // 2
