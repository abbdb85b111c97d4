"""What tests are made of: scenes, an oracle, error budgets, poison, a compiler without a GPU.

Never imported by the library. Nothing here calls an operator of `looseleaf.ops`, so that what it
says about one is a second opinion.
"""
