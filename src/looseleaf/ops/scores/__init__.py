"""What the attention operators have in common: scores, visibility, the softmax; no operator of its
own.

``reference.py`` has it dense, ``kernel.py`` a tile at a time.
"""
