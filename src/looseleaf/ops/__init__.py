"""Operators on tensors: contract, CPU reference, CPU path where the reference is slow, Triton
kernel.

``ops/<op>/__init__.py`` states the contract and picks an implementation by device; ``reference.py``
reads like the equation and defines what is right; ``kernel.py`` is the only kind of file that
imports triton. An implementation that is asked for by name runs or raises: there is no silent
fall-back. By ``cpu`` the CPU's own is asked for, which is the reference where that is fast enough
(`looseleaf.ops.dispatch`)."""
