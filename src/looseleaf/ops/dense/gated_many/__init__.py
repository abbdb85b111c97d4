"""`looseleaf.ops.dense.gated_linear` for more than 192 rows on Hopper: tensor cores limit it."""
