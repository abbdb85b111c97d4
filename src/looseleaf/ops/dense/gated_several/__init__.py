"""`looseleaf.ops.dense.gated_linear` for 65 to 192 rows on Hopper, which read the matrix once."""
