"""``looseleaf bench hybrids``: documents as affine maps of the states of linear layers.

A prototype: it reads Transformers' models and answers whether the maps hold. No engine uses it."""

from looseleaf_lab.bench.hybrids.rows import PARTS, HybridsConfig, measure
from looseleaf_lab.bench.hybrids.tiny import FAMILIES

__all__ = ["FAMILIES", "PARTS", "HybridsConfig", "measure"]
