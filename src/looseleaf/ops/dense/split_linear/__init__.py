"""The product of a few rows and a large matrix, split along the inner dim (split-K).

Such a product is bound by the read of its matrix, and needs all SMs for it. The output tiles alone
are fewer than the SMs, so each SM also takes a part of the inner dim. The next operator,
`looseleaf.ops.dense.rms_norm`, sums the parts. With more than `MAX_ROWS` rows, two parts by the
library's batched product can be faster than one.

`whole_linear` is the same kernel without a split, for products with enough output tiles. It
prefetches its matrix while the previous kernel runs."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.split_linear.reference import (
    split_linear_reference,
    whole_linear_reference,
)
from looseleaf.ops.dispatch import Implementation, choose

MAX_ROWS = 64
"""Largest number of rows of the kernel."""

TILE_FEATURES, TILE_INNER = 64, 128
"""Outputs and inner dims of a tile."""

_MAX_PARTS = 4
# (least inner dim, most rows) for which two parts by the library beat one (docs/log.md)
_HALVED_ROWS = ((8192, 256), (4096, 224))
# rows and outputs of a tile of the library
_LIBRARY_TILE = 128


def num_parts(x: Tensor, weight: Tensor, num_sms: int) -> int:
    """Best number of parts of the inner dim on ``num_sms`` SMs; 0 if a plain product is faster."""
    rows, inner = x.shape
    features = weight.shape[0]
    if x.itemsize != 2 or features % TILE_FEATURES:
        return 0
    if rows > MAX_ROWS:
        max_rows = next((max_rows for min_inner, max_rows in _HALVED_ROWS if inner >= min_inner), 0)
        tiles = -(-rows // _LIBRARY_TILE) * -(-features // _LIBRARY_TILE)
        return 2 if rows <= max_rows and inner % 2 == 0 and 2 * tiles <= num_sms else 0
    tiles = features // TILE_FEATURES
    fitting = (n for n in range(_MAX_PARTS, 1, -1) if inner % (n * TILE_INNER) == 0)
    return next((n for n in fitting if tiles * n <= num_sms), 0)


def split_linear(
    x: Float[Tensor, "rows inner"],
    weight: Float[Tensor, "features inner"],
    parts: int,
    implementation: Implementation = "auto",
) -> Float[Tensor, "parts rows features"]:
    """fp32 summands of ``x @ weight.T``: ``out[p]`` is the product over part ``p`` of the inner
    dim.

    ``x`` and ``weight`` are 16-bit and row-contiguous on a GPU. The kernel takes ``parts`` from
    `num_parts` and at most `MAX_ROWS` rows; more rows go to the GPU library. Raises InvalidOption
    for an unknown ``implementation``."""
    if x.is_cuda and len(x) > MAX_ROWS and implementation == "auto":
        rows, matrix = (side.unflatten(1, (parts, -1)).transpose(0, 1) for side in (x, weight))
        return torch.bmm(rows, matrix.transpose(1, 2), out_dtype=torch.float32)
    if choose(implementation, x) == "triton":
        from looseleaf.ops.dense.split_linear.kernel import split_linear_triton

        return split_linear_triton(x, weight, parts)
    return split_linear_reference(x, weight, parts)


def serves_whole(x: Tensor, weight: Tensor) -> bool:
    """Whether `whole_linear` is faster than the library for this product on its device.

    True for few 16-bit rows on Hopper and later, if output tiles fill at least half of the SMs and
    at most all."""
    (rows, inner), features = x.shape, weight.shape[0]
    if not x.is_cuda or rows > MAX_ROWS or x.itemsize != 2 or x.dtype != weight.dtype:
        return False
    properties = torch.cuda.get_device_properties(x.device)
    tiles, num_sms = features // TILE_FEATURES, properties.multi_processor_count
    fit = features % TILE_FEATURES == 0 and inner % TILE_INNER == 0 and weight.is_contiguous()
    return fit and properties.major >= 9 and num_sms <= 2 * tiles <= 2 * num_sms


def whole_linear(
    x: Float[Tensor, "rows inner"],
    weight: Float[Tensor, "features inner"],
    implementation: Implementation = "auto",
) -> Float[Tensor, "rows features"]:
    """``x @ weight.T``: summed in fp32, rounded once to the dtype of ``x``. Rows are contiguous.

    Raises InvalidOption for an unknown ``implementation``."""
    if choose(implementation, x) == "triton":
        from looseleaf.ops.dense.split_linear.kernel import whole_linear_triton

        return whole_linear_triton(x, weight)
    return whole_linear_reference(x, weight)
