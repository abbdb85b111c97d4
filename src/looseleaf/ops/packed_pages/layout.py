"""The memory layout of a block of packed numbers."""

BLOCK = 2048
"""Numbers per block."""
GROUP = 128
"""Numbers that share a largest exponent."""
SPILLED = 15
"""Most exponents of a block that may be spilled."""
LOW_AT = BLOCK // 2
"""Offset of signs and mantissas, in bytes."""
TOPS_AT = LOW_AT + BLOCK
"""Offset of the groups' largest exponents, in bytes."""
COUNT_AT = TOPS_AT + BLOCK // GROUP
"""Offset of the number of spills, then of the spills, in four bytes each."""
BLOCK_BYTES = COUNT_AT + 4 * (1 + SPILLED)
"""Bytes per block: 0.77 of the unpacked size."""
