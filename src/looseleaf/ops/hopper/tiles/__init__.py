"""Tiles of `looseleaf.ops.hopper.attention`; not an operator."""
