"""The span loop of `looseleaf.ops.hopper.attention`; not an operator."""
