"""Operators on tensors: each has a contract, a CPU reference and a Triton kernel.

``ops/<op>/__init__.py`` states the contract and selects an implementation by device.
``reference.py`` follows the equation and defines the correct result. ``cpu.py`` is a faster CPU
path of an operator with a slow reference. Only ``kernel.py`` imports triton. An implementation
named by the caller runs or raises; no other replaces it (`looseleaf.ops.dispatch`)."""
