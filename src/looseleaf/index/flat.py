"""The exhaustive index: a search compares every key. It is the baseline of the others."""

from looseleaf.config.index import IndexConfig
from looseleaf.index.base import Arrays, KVIndex
from looseleaf.index.keys import KeyVectors


class FlatIndex(KVIndex):
    """Exact search; ``effort`` is ignored."""

    kind = "flat"

    @classmethod
    def build(cls, keys: KeyVectors, config: IndexConfig) -> "FlatIndex":
        """An index over ``keys``, without a structure."""
        return cls(keys, 0, config, 0)

    def structure(self) -> Arrays:
        return {}

    @classmethod
    def load(cls, arrays: Arrays, keys: KeyVectors, config: IndexConfig) -> "FlatIndex":
        return cls(keys, 0, config, 0)
