"""A rank's parts of the stored matrices: heads, columns of the MLP, whole blocks and groups."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.errors import UnsupportedModel
from looseleaf.ops.dense.quantized_linear import BlockMatrix
from looseleaf.ops.dense.scaled_linear import TILE, ScaledMatrix
from looseleaf.parallel import Cut, Shard

Cuts = Sequence[Cut] | None
"""A part of each of several tensors; None for whole tensors."""


class LayerCuts(NamedTuple):
    """A rank's parts of a layer's matrices, by stored tensor; None for whole matrices."""

    qkv: Cuts = None
    output: Cuts = None
    gate_up: Cuts = None
    down: Cuts = None
    sinks: Cuts = None

    @classmethod
    def of(cls, config: ModelConfig, shard: Shard | None, fused: bool, num_up: int) -> "LayerCuts":
        """The parts of rank ``shard``. ``fused`` is whether q, k and v are one tensor, and
        ``num_up`` the number of tensors of the gate and the up projection."""
        if shard is None:
            return cls()
        inner, q_size = config.intermediate_size, config.num_qo_heads * config.head_dim
        queries, kv_size = shard.queries(config), config.num_kv_heads * config.head_dim
        if fused:
            keys, values = shard.keys(config, q_size), shard.keys(config, q_size + kv_size)
            qkv = [Cut((queries, keys, values))]
        else:
            qkv = [Cut((queries,)), Cut((shard.keys(config),)), Cut((shard.keys(config),))]
        gates = (shard.even(inner), shard.even(inner, inner))
        joined = num_up == 1 and config.gated_mlp
        gate_up = [Cut(gates)] if joined else [Cut(gates[:1])] * num_up
        sinks = [Cut((shard.even(config.num_qo_heads),))]
        return cls(qkv, [Cut(columns=queries)], gate_up, [Cut(columns=shard.even(inner))], sinks)


def cut_blocks(matrix: BlockMatrix, cut: Cut) -> list[BlockMatrix]:
    """The part ``cut`` of a matrix in GGUF's blocks, a matrix per run of rows.

    Raises UnsupportedModel if its columns are not whole blocks."""
    name, size = matrix.layout.name, matrix.layout.block
    blocks = matrix.blocks
    if cut.columns is not None:
        start, stop = cut.columns.start, cut.columns.stop
        if start % size or stop % size:
            raise UnsupportedModel(
                f"a rank's {stop - start} columns of a matrix in {name} are not whole blocks of "
                f"{size}: choose another tensor_parallel, or a file of another format"
            )
        num_bytes = matrix.layout.block_bytes
        blocks = blocks[:, start // size * num_bytes : stop // size * num_bytes].contiguous()
    return [BlockMatrix(name, blocks[rows]) for rows in cut.rows or (slice(None),)]


def cut_codes(matrix: ScaledMatrix, cut: Cut) -> ScaledMatrix:
    """The part ``cut`` of a matrix of codes.

    Raises UnsupportedModel if its columns are not whole groups."""
    if cut.rows:
        rows = torch.cat([torch.arange(part.start, part.stop) for part in cut.rows])
        matrix = matrix.rows(rows.to(matrix.device))
    if cut.columns is None:
        return matrix
    start, stop, shared = cut.columns.start, cut.columns.stop, matrix.scales.shape[1] == 1
    unit = math.lcm(1 if shared else matrix.group, TILE if matrix.kind == "int4" else 1)
    if start % unit or stop % unit:
        raise UnsupportedModel(
            f"a rank's {stop - start} columns of a quantized matrix are not whole groups of "
            f"{unit}: choose another tensor_parallel, or a checkpoint with smaller groups"
        )
    per_code = 2 if matrix.kind == "int4" else 1
    codes = matrix.codes[:, start // per_code : stop // per_code].contiguous()
    scales, zeros = matrix.scales, matrix.zeros
    if not shared:
        groups = slice(start // matrix.group, stop // matrix.group)
        scales = scales[:, groups].contiguous()
        zeros = None if zeros is None else zeros[:, groups].contiguous()
    return ScaledMatrix(matrix.kind, codes, scales, zeros)


def part_shape(shape: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    """The shape of a part of a matrix, of a vector, which has rows only, or of a whole tensor."""
    if cut == Cut():
        return shape
    features, *columns = shape
    return cut.shape(features, columns[0]) if columns else cut.shape(features, 1)[:1]


def taken(whole: Tensor, cut: Cut) -> Tensor:
    """The part ``cut`` of a matrix or vector."""
    if cut.rows:
        whole = torch.cat([whole[rows] for rows in cut.rows])
    return whole if cut.columns is None or whole.ndim == 1 else whole[:, cut.columns]
