"""Random matrices in GGUF's block formats: any codes, finite scales."""

import math

import numpy as np
import torch

from looseleaf.ops.dense.quantized_linear import FORMATS, BlockMatrix
from looseleaf.ops.dense.quantized_linear.formats import MXFP4_SCALES

# first bytes of the float16 scales of a block
_SCALE_BYTES = {"Q6_K": (208,)}


def random_blocks(
    name: str, features: int, columns: int, *, seed: int = 0, scale: float = 0.01
) -> BlockMatrix:
    """A matrix ``[features, columns]`` with normal block scales of size ``scale``."""
    layout, generator = FORMATS[name], np.random.default_rng(seed)
    if layout.bits == 16:
        dtype = torch.bfloat16 if name == "BF16" else torch.float16
        values = torch.from_numpy(generator.standard_normal((features, columns)) * scale).to(dtype)
        return BlockMatrix(name, values.view(torch.uint8))
    shape = (features, columns // layout.block, layout.block_bytes)
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    if name == "MXFP4":
        # scales are powers of two around `scale`
        middle = round(math.log2(max(scale, 2.0**-24))) + 128
        least, most = MXFP4_SCALES[0], MXFP4_SCALES[-1]
        powers = generator.integers(middle - 1, middle + 2, shape[:2])
        blocks[:, :, 0] = powers.clip(least, most).astype(np.uint8)
        return BlockMatrix(name, torch.from_numpy(blocks.reshape(features, -1)))
    starts = _SCALE_BYTES.get(name, (0, 2) if layout.has_min else (0,))
    for start in starts:
        halves = generator.standard_normal((*shape[:2], 1)) * scale
        blocks[:, :, start : start + 2] = halves.astype(np.float16).view(np.uint8)
    return BlockMatrix(name, torch.from_numpy(blocks.reshape(features, -1)))


def normal_blocks(name: str, features: int, columns: int, *, seed: int = 0) -> BlockMatrix:
    """As `random_blocks`, with values whose root of the mean square is ``columns ** -0.5``."""
    spread = float(random_blocks(name, 16, columns, seed=seed, scale=1.0).dequantize().std())
    return random_blocks(name, features, columns, seed=seed, scale=columns**-0.5 / spread)
