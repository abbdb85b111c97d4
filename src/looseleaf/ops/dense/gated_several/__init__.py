"""`looseleaf.ops.dense.gated_linear` for 65 to 192 rows on Hopper: they read the matrix once."""
