"""RoPE: rotation of queries and keys by their positions.

A stored key is rotated by its position in its own segment (the frame); the query is rotated into
that frame. ``laws`` computes frequencies from a configuration. ``frames`` computes rotation tables,
softmax scales, and fingerprints for the identity of keys.
"""

from looseleaf.rope.frames import (
    build_rotation,
    layer_rotations,
    map_distinct,
    model_rope_fingerprint,
    position_scales,
    query_scale,
    rope_fingerprint,
    softmax_scale,
)
from looseleaf.rope.laws import rope_frequencies

__all__ = [
    "build_rotation",
    "layer_rotations",
    "map_distinct",
    "model_rope_fingerprint",
    "position_scales",
    "query_scale",
    "rope_fingerprint",
    "rope_frequencies",
    "softmax_scale",
]
