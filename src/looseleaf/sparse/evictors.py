"""The eviction policies, by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from looseleaf.config import Select, share_of
from looseleaf.sparse.evicting import Evictor
from looseleaf.sparse.h2o import H2O
from looseleaf.sparse.snapkv import SnapKV
from looseleaf.sparse.tova import Tova

_EVICTORS: Mapping[str, Callable[[int], Evictor]] = MappingProxyType(
    {"snapkv": SnapKV, "tova": Tova, "h2o": H2O}
)


def make_evictor(select: Select | None, num_tokens: int) -> Evictor | None:
    """The eviction policy that ``select`` names, for a prompt of ``num_tokens`` tokens; None if it
    evicts nothing."""
    if select is None or select.policy not in _EVICTORS:
        return None
    kept = select.tokens
    if kept is None:
        assert select.ratio is not None, "a capacity is a number of tokens or a share"
        kept = share_of(select.ratio, num_tokens)
    return _EVICTORS[select.policy](kept)
