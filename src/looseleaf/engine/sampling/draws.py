"""Random numbers without a generator: each is a function of a seed, an output and a step.

Nothing is kept between steps, so a draw depends neither on batch mates nor on the place in the
batch, and an output that is preempted and computed again goes on as if nothing had happened.
"""

from hashlib import blake2b


def uniform(seed: int, child: int, step: int) -> float:
    """A number in [0, 1) for output ``child`` of a request at its ``step``-th token."""
    digest = blake2b(f"{seed}/{child}/{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
