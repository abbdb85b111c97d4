"""Units and producer warps of `looseleaf.ops.hopper.attention`; not an operator."""
