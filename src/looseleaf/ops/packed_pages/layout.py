"""Where what stands in a block of packed numbers."""

BLOCK = 2048
"""Numbers of a block."""
GROUP = 128
"""Numbers that share a largest exponent."""
SPILLED = 15
"""Exponents of a block that may be written out."""
LOW_AT = BLOCK // 2
"""Where sign and mantissa begin, behind the four bits each."""
TOPS_AT = LOW_AT + BLOCK
"""Where the largest exponents begin."""
COUNT_AT = TOPS_AT + BLOCK // GROUP
"""Where it says how many exponents are written out, in four bytes each, the count and they."""
BLOCK_BYTES = COUNT_AT + 4 * (1 + SPILLED)
"""Bytes of a block: 0.77 of what its numbers take."""
