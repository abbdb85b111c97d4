"""Text of the haystacks: noise, essays of idle sentences, words, keys and values."""

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
    """A function that cycles through a few sentences."""
    start = rng.randrange(len(NOISE))
    numbers = iter(range(start, 1 << 62))
    return lambda: NOISE[next(numbers) % len(NOISE)]


def essay(rng: random.Random) -> Callable[[], str]:
    """A function that returns idle sentences of the generated world, with few repetitions."""
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
    """Six random letters."""
    return "".join(rng.choices(_LETTERS, k=6))


def distinct(make: Callable[[], str], count: int) -> list[str]:
    """``count`` distinct results of ``make``."""
    values: dict[str, None] = {}
    while len(values) < count:
        values[make()] = None
    return list(values)


def plain_words(rng: random.Random) -> Iterator[str]:
    """An endless series of distinct words: single words of the language, then pairs."""
    single = list(dict.fromkeys((*words.COMMON, *words.VERBS, *words.ADJECTIVES)))
    rng.shuffle(single)
    yield from single
    used = set()
    while True:
        pair = f"{rng.choice(single)}-{rng.choice(single)}"
        if pair not in used:
            used.add(pair)
            yield pair
