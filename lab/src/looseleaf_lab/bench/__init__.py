"""Benchmarks against a baseline of the same run, whose rows are appended to ``results/``."""
