"""`looseleaf.ops.gated_linear` for many rows on Hopper, where multiplying is what takes long."""
