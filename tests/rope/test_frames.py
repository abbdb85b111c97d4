"""The frame identity, rotation tables, and fingerprints of RoPE configurations."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from looseleaf.config import ModelConfig, RopeConfig
from looseleaf.errors import InvalidOption
from looseleaf.ops.rotate import rotate
from looseleaf.rope import (
    build_rotation,
    frames,
    layer_rotations,
    map_distinct,
    model_rope_fingerprint,
    query_scale,
    rope_fingerprint,
    rope_frequencies,
    softmax_scale,
)
from looseleaf.types import Rotation
from looseleaf_lab.bench.model_shapes import MODEL_SHAPES

HEAD_DIM = 16
LAWS: dict[str, dict[str, Any]] = {
    "none": {},
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


def layered(*ropes: RopeConfig, **changes: Any) -> ModelConfig:
    """A model whose layers have these laws."""
    tiny = replace(MODEL_SHAPES["tiny"], num_layers=len(ropes), rope=ropes[0])
    return replace(tiny, layer_ropes=ropes, **changes)


def of_laws(*laws: str) -> ModelConfig:
    return layered(*(make(law) for law in laws))


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
    two = make("default"), make("yarn", attention_factor=1.5)
    assert softmax_scale(layered(*two), 0) == HEAD_DIM**-0.5
    assert softmax_scale(layered(*two), 1) == pytest.approx(HEAD_DIM**-0.5 * 2.25)
    own = layered(*two, softmax_scale=0.4)
    assert softmax_scale(own, 1) == pytest.approx(0.4 * 2.25)


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
        replace(make("default"), rotary_dim=7)


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


def test_layers_of_one_law_share_a_table_and_others_have_their_own() -> None:
    first, second, third = layer_rotations(of_laws("llama3", "none", "llama3"), 9)
    assert first is third and first is not second
    assert torch.equal(first.cos, build_rotation(make("llama3"), 9).cos)


def test_what_is_made_of_tables_is_made_once_for_layers_that_share_one() -> None:
    tables, made = layer_rotations(of_laws("llama3", "none", "llama3", "none"), 9), []

    def make(table: Rotation) -> int:
        made.append(table)
        return len(made)

    assert map_distinct(tables, make) == [1, 2, 1, 2]
    assert made[0] is tables[0] and made[1] is tables[1]


def test_the_law_of_no_rotation_leaves_what_it_turns_as_it_was() -> None:
    x = torch.randn(2, 3, HEAD_DIM)
    assert torch.equal(rotate(x, torch.tensor([0, 7]), build_rotation(make("none"), 9)), x)


def test_the_fingerprint_of_a_model_is_that_of_its_law_or_of_all_layers_in_order() -> None:
    one = replace(of_laws("llama3"), layer_ropes=())
    same = of_laws("llama3", "llama3")
    assert model_rope_fingerprint(one) == rope_fingerprint(make("llama3"))
    assert model_rope_fingerprint(same) == rope_fingerprint(make("llama3"))
    laws = [("llama3", "none"), ("none", "llama3"), ("llama3", "linear"), ("none", "none")]
    assert len({model_rope_fingerprint(of_laws(*two)) for two in laws}) == len(laws)


def test_every_law_of_a_model_is_frozen_at_a_length() -> None:
    frozen = of_laws("dynamic", "longrope").frozen_at(77)
    assert frozen.rope.length == 77 and {rope.length for rope in frozen.ropes} == {77}


def test_layers_that_are_laid_out_differently_or_too_few_are_refused() -> None:
    with pytest.raises(InvalidOption, match="the same pairs of dims"):
        layered(make("llama3"), make("llama3", "partial"))
    with pytest.raises(InvalidOption, match="1 laws for 2 layers"):
        replace(of_laws("llama3", "none"), layer_ropes=(make("llama3"),))
