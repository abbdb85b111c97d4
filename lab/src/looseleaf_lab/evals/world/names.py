"""Made-up proper names, with a fixed split into names for training and held-out names.

A checksum of the name decides, so an evaluation world of any seed shares no made-up name with any
training world.
"""

from __future__ import annotations

import functools
import random
import zlib

_ONSETS = (
    "b br c ch d dr f fl g gr h j k l m n p pr qu r s sh st t th tr v w z b d k l m n r s t v m"
).split()
_VOWELS = "a e i o u a e i o a e i o ai ei ia ou ee".split()
_CODAS = "n r l s m nd n rn ll sk lt n rd st lm".split()
_ENDINGS = (
    "a o i an en in on er or el il ar ard and eth ell inn ock ow us is ia ane ine old art ale "
    "ona ira emi ulo ova eri ando ettle ison erby ton field stead moor ley ham land wick"
).split()
_NO_STEMS = {"cum", "hor"}
_NUM_STEMS = 260
_WILD_SHARE = 0.05  # share of names that are not stem + ending, with more and rarer tokens
_POOL_SIZE = 12_000
_POOL_SEED = 20_231
_HELD_OUT_SHARE = 10


def is_held_out(name: str) -> bool:
    """Whether this name is excluded from training."""
    return zlib.crc32(name.encode()) % _HELD_OUT_SHARE == 0


def _stem(rng: random.Random) -> str:
    """A syllable that ends in a consonant: "tor", "mill", "quan"."""
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)


def _wild(rng: random.Random) -> str:
    coda = rng.choice(_CODAS) if rng.random() < 0.3 else ""
    middle = rng.choice(_ONSETS) + rng.choice(_VOWELS) + coda
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + middle + rng.choice(("", "n", "s", "k"))


def fresh_name(rng: random.Random) -> str:
    """A training name outside of the pool, so that a model can't memorize all names."""
    while True:
        name = _wild(rng) if rng.random() < 0.35 else _stem(rng) + rng.choice(_ENDINGS)
        if 4 <= len(name) <= 10 and not is_held_out(name.capitalize()):
            return name.capitalize()


@functools.cache
def name_pool(held_out: bool) -> tuple[str, ...]:
    """All made-up names of one side of the split, in a fixed order."""
    rng = random.Random(_POOL_SEED)
    candidates = {_stem(rng) for _ in range(4 * _NUM_STEMS)} - _NO_STEMS
    stems = sorted(candidates, key=lambda stem: (len(stem), stem))
    stems = rng.sample(stems[: 2 * _NUM_STEMS], _NUM_STEMS)
    names: dict[str, None] = {}
    while len(names) < _POOL_SIZE:
        wild = rng.random() < _WILD_SHARE
        name = _wild(rng) if wild else rng.choice(stems) + rng.choice(_ENDINGS)
        if 4 <= len(name) <= 10:
            names[name.capitalize()] = None
    return tuple(name for name in names if is_held_out(name) == held_out)
