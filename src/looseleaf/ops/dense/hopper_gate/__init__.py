"""Activation of the gated products on Hopper; see `looseleaf.ops.dense.gated_linear`."""
