"""The product of one to four rows with codes of a byte, without tensor cores.

Tensor cores need operands in their own layout, and rearranging codes for so few rows takes longer
than the read of the matrix. Here each thread multiplies the codes that it has read. The contract is
that of `looseleaf.ops.dense.scaled_linear`, which chooses between both."""

MAX_ROWS = 4
"""Most rows of the kernel."""
