"""Device functions of `looseleaf.ops.hopper_attention`; no operator of its own."""
