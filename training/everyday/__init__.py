"""Everyday notes and questions about them, for training only: far more varied than the world.

Facts are made from templates over broad lists of English nouns and verbs, with made-up words among
them and with values of many tokens, so that reading and copying cannot lean on a known vocabulary.
"""

from training.everyday.compose import Note, compose

__all__ = ["Note", "compose"]
