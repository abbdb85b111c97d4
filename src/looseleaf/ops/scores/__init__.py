"""Scores, visibility and softmax for the attention operators; not an operator itself.

``reference.py`` computes them dense, ``kernel.py`` one tile at a time."""
