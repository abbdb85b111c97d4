"""Device functions of the gated products on Hopper; see `looseleaf.ops.gated_linear`."""
