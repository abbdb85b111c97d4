"""Rendezvous hashing of several weighted keys at once.

Each pair of key and replica has a pseudo-random number ``u`` in (0, 1). A replica's score is
``sum(weight / -ln u)`` over a request's keys, the logarithmic method of weighted rendezvous hashing
(Schindelhauer and Schomaker, SPAA 2005). A score does not depend on the other replicas. So a
replica that joins or leaves moves only requests to or from itself."""

import hashlib
import math
from collections.abc import Iterable

_RANGE = 2**64


def rendezvous_score(replica: str, keys: Iterable[tuple[str, int]]) -> float:
    """The score of a replica for ``keys``, pairs of a tag and its weight in tokens."""
    return sum(weight / -math.log(_uniform(replica, tag)) for tag, weight in keys)


def _uniform(replica: str, tag: str) -> float:
    """A number in (0, 1), equal in all processes."""
    state = hashlib.blake2b(f"{replica}\0{tag}".encode("utf-8", "replace"), digest_size=8)
    # 53 bits keep the quotient below 1
    return ((int.from_bytes(state.digest(), "little") >> 11) + 0.5) / (_RANGE >> 11)
