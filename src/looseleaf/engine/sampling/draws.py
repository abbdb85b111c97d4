"""Random numbers without a generator: each is a function of a seed, an output and a step.

So a draw does not depend on the batch, and preempted outputs resume with the same draws.
"""

from hashlib import blake2b


def uniform(seed: int, child: int, step: int) -> float:
    """A number in [0, 1) for output ``child`` of a request at its ``step``-th token."""
    digest = blake2b(f"{seed}/{child}/{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
