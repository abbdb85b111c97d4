"""A rank's part of a quantized matrix: whole blocks or whole groups of its codes."""

import math

import torch

from looseleaf.errors import UnsupportedModel
from looseleaf.ops.dense.quantized_linear import BlockMatrix
from looseleaf.ops.dense.scaled_linear import TILE, ScaledMatrix
from looseleaf.parallel import Cut


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
