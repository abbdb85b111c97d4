"""The slices of all ranks together are the whole matrix, in every format."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from looseleaf.errors import InvalidOption, UnsupportedModel
from looseleaf.models import load_weights, read_config
from looseleaf.models.checkpoint.cuts import cut_blocks, cut_codes
from looseleaf.models.linear import unpack
from looseleaf.ops.dense.quantized_linear import FORMATS
from looseleaf.ops.dense.scaled_linear import ScaledMatrix, dequantize, quantize
from looseleaf.parallel import Collectives, Cut, Link, Ranks, Shard
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.testing.quantized import normal_blocks
from tests.models.scaled_files import FORMS, write_scaled

ROWS = (slice(8, 16), slice(40, 64))
COLUMNS = slice(256, 512)


def part_of(whole: Tensor) -> Tensor:
    return torch.cat([whole[rows] for rows in ROWS])[:, COLUMNS]


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_of_blocks_has_the_values_of_the_whole(name: str) -> None:
    matrix = normal_blocks(name, 64, 768)
    parts = cut_blocks(matrix, Cut(ROWS, COLUMNS))
    values = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(values, part_of(matrix.dequantize()))


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_part_of_codes_has_the_values_of_the_whole(kind: Any) -> None:
    matrix = quantize(torch.randn(64, 768, generator=torch.Generator().manual_seed(0)), kind)
    part = cut_codes(matrix, Cut(ROWS, COLUMNS))
    assert torch.equal(dequantize(part, torch.float32), part_of(dequantize(matrix, torch.float32)))


def test_a_part_of_groups_has_their_scales() -> None:
    codes = torch.randn(64, 768).to(torch.float8_e4m3fn)
    matrix = ScaledMatrix("fp8", codes, torch.rand(64, 6) + 0.5)
    part = cut_codes(matrix, Cut(ROWS, COLUMNS))
    assert part.scales.shape == (32, 2)
    assert torch.equal(dequantize(part, torch.float32), part_of(dequantize(matrix, torch.float32)))


def test_columns_that_are_no_whole_blocks_or_groups_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="whole blocks of 256"):
        cut_blocks(normal_blocks("Q4_K", 64, 768), Cut(columns=slice(0, 384)))
    with pytest.raises(UnsupportedModel, match="whole groups of 128"):
        cut_codes(quantize(torch.randn(64, 768), "int4"), Cut(columns=slice(0, 192)))


def alone(shard: Shard) -> Ranks:
    """A rank that sends nothing."""
    return Ranks(shard, MagicMock(spec=Collectives), Link(shard.rank, []))


@pytest.mark.parametrize("form", FORMS)
def test_ranks_share_a_quantized_checkpoint(tmp_path: Path, form: str) -> None:
    write_scaled(tmp_path, form)
    config = read_config(tmp_path)
    whole = load_weights(tmp_path, config, torch.float32, packed=False).layers[0]
    shards = [Shard(rank, 2) for rank in range(2)]
    first, second = (
        load_weights(tmp_path, config, torch.float32, packed=False, ranks=alone(shard)).layers[0]
        for shard in shards
    )
    joined = torch.cat([unpack(half.output.weight) for half in (first, second)], 1)
    assert torch.equal(joined, unpack(whole.output.weight))
    joined = torch.cat([unpack(half.down.weight) for half in (first, second)], 1)
    assert torch.equal(joined, unpack(whole.down.weight))
    gates = [unpack(half.gate_up.weight).chunk(2) for half in (first, second)]
    joined = torch.cat([gates[0][0], gates[1][0], gates[0][1], gates[1][1]])
    assert torch.equal(joined, unpack(whole.gate_up.weight))


def test_ranks_beyond_the_kv_heads_have_the_same_head() -> None:
    config = replace(model_shape("tiny"), num_qo_heads=8, num_kv_heads=2)
    keys = [Shard(rank, 4).keys(config) for rank in range(4)]
    assert keys == [slice(0, 16), slice(0, 16), slice(16, 32), slice(16, 32)]
    assert Shard(0, 4).local(config).num_kv_heads == 1


def test_every_token_belongs_to_one_rank() -> None:
    parts = [Shard(rank, 4).vocabulary(321) for rank in range(4)]
    assert [token for part in parts for token in range(321)[part]] == [*range(321)]
    assert {Shard(rank, 4).largest_vocabulary(321) for rank in range(4)} == {81}


def test_models_that_can_not_be_split_are_refused() -> None:
    config = model_shape("tiny")
    with pytest.raises(InvalidOption, match="tensor_parallel=7"):
        Shard(0, 7).require(config)
    with pytest.raises(UnsupportedModel, match="norm all heads jointly"):
        Shard(0, 2).require(replace(config, qk_norm=True, joint_qk_norm=True))
