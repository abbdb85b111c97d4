"""Tools for tests: scenes, an oracle, error budgets, poison, a compiler without a GPU.

The library never imports them. They call no operator of `looseleaf.ops`, so their results are
independent of the operators.
"""
