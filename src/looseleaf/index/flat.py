"""The index without structure: every key is compared. The yardstick of the others."""

from looseleaf.config.index import IndexConfig
from looseleaf.index.base import Arrays, KVIndex
from looseleaf.index.keys import KeyVectors


class FlatIndex(KVIndex):
    """Exact; ``effort`` means nothing."""

    kind = "flat"

    @classmethod
    def build(cls, keys: KeyVectors, config: IndexConfig) -> "FlatIndex":
        """Nothing is built."""
        return cls(keys, 0, config, 0)

    def structure(self) -> Arrays:
        return {}

    @classmethod
    def load(cls, arrays: Arrays, keys: KeyVectors, config: IndexConfig) -> "FlatIndex":
        return cls(keys, 0, config, 0)
