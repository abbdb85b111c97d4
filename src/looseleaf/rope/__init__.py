"""Where a key stands: the angle a position turns each pair of dims by, and a key's identity.

A stored key is turned by its place in its own segment; the query comes to it. ``laws`` says how
fast each pair turns, ``frames`` makes the table of a whole engine and the name of everything that
changes a key.
"""

from looseleaf.rope.frames import (
    build_rotation,
    layer_rotations,
    made_once,
    model_rope_fingerprint,
    query_scale,
    rope_fingerprint,
    softmax_scale,
)
from looseleaf.rope.laws import rope_frequencies

__all__ = [
    "build_rotation",
    "layer_rotations",
    "made_once",
    "model_rope_fingerprint",
    "query_scale",
    "rope_fingerprint",
    "rope_frequencies",
    "softmax_scale",
]
