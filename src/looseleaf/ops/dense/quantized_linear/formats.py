"""GGUF's block formats with 4 to 8 bits per weight, and its 16-bit floats: numbers and sizes.

A value of MXFP4 is a scale, which is a power of two, times one of 16 floats of 4 bits (OCP
Microscaling Formats 1.0). Its codes here are these floats times two, plus 12. In other formats a
value is ``scale * (code - zero) + min``. A block holds one scale, or one scale and small scale
codes of its sub-blocks. Layouts of blocks are those of GGUF.
"""

from dataclasses import dataclass

from looseleaf.errors import UnsupportedModel

CHUNK = 32
"""Values with one scale of the activations."""


@dataclass(frozen=True)
class BlockFormat:
    """A format. ``number`` is GGUF's; ``block`` and ``sub`` are values per block and per scale."""

    name: str
    number: int
    bits: int
    zero: int
    block: int
    sub: int
    has_min: bool
    block_bytes: int


_FORMATS = (
    BlockFormat("F16", 1, 16, 0, 32, 32, False, 64),
    BlockFormat("BF16", 30, 16, 0, 32, 32, False, 64),
    BlockFormat("Q4_0", 2, 4, 8, 32, 32, False, 18),
    BlockFormat("Q4_1", 3, 4, 0, 32, 32, True, 20),
    BlockFormat("Q5_0", 6, 5, 16, 32, 32, False, 22),
    BlockFormat("Q5_1", 7, 5, 0, 32, 32, True, 24),
    BlockFormat("Q8_0", 8, 8, 128, 32, 32, False, 34),
    BlockFormat("Q4_K", 12, 4, 0, 256, 32, True, 144),
    BlockFormat("Q5_K", 13, 5, 0, 256, 32, True, 176),
    BlockFormat("MXFP4", 39, 4, 12, 32, 32, False, 17),
    BlockFormat("Q6_K", 14, 6, 32, 256, 16, False, 210),
)
MXFP4_CODES = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Twice the floats of 4 bits, in the order of their bits, plus 12."""
MXFP4_SCALES = range(104, 144)
"""Stored exponents whose scales are float16, as the packed layout needs."""
FORMATS = {entry.name: entry for entry in _FORMATS}
"""The formats by name."""


def block_format(name: str) -> BlockFormat:
    """The format ``name``. Raises UnsupportedModel for another one."""
    if name not in FORMATS:
        raise UnsupportedModel(
            f"weights in {name[:200]} are not supported: use one of {', '.join(FORMATS)}, or "
            "float32, float16 or bfloat16"
        )
    return FORMATS[name]
