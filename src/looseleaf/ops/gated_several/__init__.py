"""`looseleaf.ops.gated_linear` for some dozens of rows on Hopper: they read the matrix once."""
