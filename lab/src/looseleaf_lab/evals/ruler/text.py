"""What the haystacks are made of: noise, essays of idle sentences, words, keys and values."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator

from looseleaf_lab.evals.world import words
from looseleaf_lab.evals.world.filler import Filler
from looseleaf_lab.evals.world.names import name_pool

NOISE = (
    "The rain fell on the roof.",
    "The clock went on.",
    "A door closed somewhere in the house.",
    "Nothing else could be heard.",
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def noise(rng: random.Random) -> Callable[[], str]:
    """The same few sentences over and over."""
    start = rng.randrange(len(NOISE))
    numbers = iter(range(start, 1 << 62))
    return lambda: NOISE[next(numbers) % len(NOISE)]


def essay(rng: random.Random) -> Callable[[], str]:
    """Idle sentences of the generated world, no two alike for long."""
    names = name_pool(True)
    return Filler(rng, lambda: rng.choice(names)).idle


def key_of_words(rng: random.Random) -> str:
    """Two words: ``quiet harbour``."""
    return f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.COMMON)}"


def number(rng: random.Random) -> str:
    """Seven digits."""
    return str(rng.randint(1_000_000, 9_999_999))


def identifier(rng: random.Random) -> str:
    """A UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def coded_word(rng: random.Random) -> str:
    """Six letters that mean nothing."""
    return "".join(rng.choices(_LETTERS, k=6))


def distinct(make: Callable[[], str], count: int) -> list[str]:
    """So many different ones."""
    made: dict[str, None] = {}
    while len(made) < count:
        made[make()] = None
    return list(made)


def plain_words(rng: random.Random) -> Iterator[str]:
    """Different words without end: those of the language first, then pairs of them."""
    single = list(dict.fromkeys((*words.COMMON, *words.VERBS, *words.ADJECTIVES)))
    rng.shuffle(single)
    yield from single
    seen = set()
    while True:
        pair = f"{rng.choice(single)}-{rng.choice(single)}"
        if pair not in seen:
            seen.add(pair)
            yield pair
