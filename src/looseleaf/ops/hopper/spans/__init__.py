"""Device functions of `looseleaf.ops.hopper.attention`; no operator of its own."""
