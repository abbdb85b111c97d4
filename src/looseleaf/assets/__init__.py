"""The reference models that ship with the package, and their names."""

from collections.abc import Mapping
from types import MappingProxyType

REFERENCE_MODELS: Mapping[str, str] = MappingProxyType(
    {"looseleaf-reference": "block", "looseleaf-reference-causal": "causal"}
)
"""The folder of each model by its name; the first is the default."""

_EARLIER_NAMES = MappingProxyType({"looseleaf-block": "block", "looseleaf-causal": "causal"})


def folder_of(name: str) -> str | None:
    """The folder of a reference model by its present or earlier name; None for other names."""
    return REFERENCE_MODELS.get(name) or _EARLIER_NAMES.get(name)


def checkpoint_of(name: str) -> str:
    """`folder_of` a name, or the name itself if it is not a reference model's."""
    return folder_of(name) or name
