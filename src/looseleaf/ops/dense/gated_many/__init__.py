"""`looseleaf.ops.dense.gated_linear` for many rows on Hopper, where products take longest."""
