"""The product of few rows and a large matrix, cut along the inner dim: what decoding waits for.

Such a product takes as long as its matrix takes to be read, if only all of the device reads. The
outputs alone are too few to give every processor a share; so each takes a part of the inner dim,
and the summands are left to whoever reads them next, `looseleaf.ops.dense.rms_norm`. Some more rows
fill half of the processors: those are cut in two, by the library's batched product.

Where the outputs alone are enough, the same kernel takes the inner dim whole. It begins to read its
matrix while the kernel before it still runs, as other products can't."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.split_linear.reference import (
    split_linear_reference,
    whole_linear_reference,
)
from looseleaf.ops.dispatch import Implementation, choose

MAX_ROWS = 64
"""More rows are not for the kernel."""

TILE_FEATURES, TILE_INNER = 64, 128
"""What a tile of the kernel has of the outputs and of the inner dim."""

_MOST_PARTS = 4
# rows up to which two parts by the library are quicker than one, for inner dims from so many on
# (docs/log.md): past them its own ways to cut are as good
_HALVED_ROWS = ((8192, 256), (4096, 224))
# rows and outputs of a tile of its
_LIBRARY_TILE = 128


def num_parts(x: Tensor, weight: Tensor, num_processors: int) -> int:
    """In how many parts the inner dim is best cut for so many processors; 0 if another product is
    better."""
    rows, inner = x.shape
    features = weight.shape[0]
    if x.itemsize != 2 or features % TILE_FEATURES:
        return 0
    if rows > MAX_ROWS:
        most = next((most for least, most in _HALVED_ROWS if inner >= least), 0)
        tiles = -(-rows // _LIBRARY_TILE) * -(-features // _LIBRARY_TILE)
        return 2 if rows <= most and inner % 2 == 0 and 2 * tiles <= num_processors else 0
    tiles = features // TILE_FEATURES
    fitting = (n for n in range(_MOST_PARTS, 1, -1) if inner % (n * TILE_INNER) == 0)
    return next((n for n in fitting if tiles * n <= num_processors), 0)


def split_linear(
    x: Float[Tensor, "rows inner"],
    weight: Float[Tensor, "features inner"],
    parts: int,
    implementation: Implementation = "auto",
) -> Float[Tensor, "parts rows features"]:
    """fp32 summands of ``x @ weight.T``: part ``p`` is over the ``p``-th of equal stretches of the
    inner dim. The kernel takes what `num_parts` has parts for; more than `MAX_ROWS` rows go to the
    library of a GPU."""
    if x.is_cuda and len(x) > MAX_ROWS and implementation == "auto":
        some, rest = (matrix.unflatten(1, (parts, -1)).transpose(0, 1) for matrix in (x, weight))
        return torch.bmm(some, rest.transpose(1, 2), out_dtype=torch.float32)
    if choose(implementation, x) == "triton":
        from looseleaf.ops.dense.split_linear.kernel import split_linear_triton

        return split_linear_triton(x, weight, parts)
    return split_linear_reference(x, weight, parts)


def serves_whole(x: Tensor, weight: Tensor) -> bool:
    """Whether `whole_linear` is the better product of such rows on their device: one that starts
    kernels early, if tiles of all features are one for most of its processors."""
    (rows, inner), features = x.shape, weight.shape[0]
    if not x.is_cuda or rows > MAX_ROWS or x.itemsize != 2 or x.dtype != weight.dtype:
        return False
    properties = torch.cuda.get_device_properties(x.device)
    tiles, processors = features // TILE_FEATURES, properties.multi_processor_count
    fit = features % TILE_FEATURES == 0 and inner % TILE_INNER == 0 and weight.is_contiguous()
    return fit and properties.major >= 9 and processors <= 2 * tiles <= 2 * processors


def whole_linear(
    x: Float[Tensor, "rows inner"],
    weight: Float[Tensor, "features inner"],
    implementation: Implementation = "auto",
) -> Float[Tensor, "rows features"]:
    """``x @ weight.T``, summed in fp32, rounded once. Rows are contiguous."""
    if choose(implementation, x) == "triton":
        from looseleaf.ops.dense.split_linear.kernel import whole_linear_triton

        return whole_linear_triton(x, weight)
    return whole_linear_reference(x, weight)
