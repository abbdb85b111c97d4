"""The prompts of the task types, each from a seed and a number of units of hay.

RULER (arXiv 2404.06654), section 3: retrieval (needle in a haystack, in eight forms), multi-hop
tracing (variables), aggregation (common and frequent words), question answering with distractors.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal

from looseleaf_lab.evals.ruler import text
from looseleaf_lab.evals.world import WorldConfig, make_world

_PAGE = 40  # sentences or words of hay to a document


@dataclass(frozen=True)
class Prompt:
    """What is read, what is asked, and the strings that an answer must hold."""

    before: str
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


Build = Callable[[int, int], Prompt]
"""From a seed and so many units of hay."""


@dataclass(frozen=True)
class Needles:
    """``keys`` needles besides those asked for, ``values`` to each of the ``asked`` keys."""

    hay: Literal["noise", "essay", "needles"]
    keys: int = 0
    values: int = 1
    asked: int = 1
    uuid_keys: bool = False
    uuid_values: bool = False

    def __call__(self, seed: int, units: int) -> Prompt:
        """The needles at random places in ``units`` sentences."""
        rng = random.Random(f"needles {seed}")
        make_key = text.identifier if self.uuid_keys else text.key_of_words
        make_value = text.identifier if self.uuid_values else text.number
        others = self.keys + (units if self.hay == "needles" else 0)
        keys = text.distinct(lambda: make_key(rng), self.asked + others)
        values = {key: [make_value(rng)] for key in keys}
        for key in keys[: self.asked]:
            values[key] = text.distinct(lambda: make_value(rng), self.values)
        what = "identifier" if self.uuid_values else "number"
        needles = [
            f"One of the special {what}s for {key} is {value}."
            for key in keys
            for value in values[key]
        ]
        sentences = needles
        if self.hay != "needles":
            sentence = text.noise(rng) if self.hay == "noise" else text.essay(rng)
            sentences = _scatter([sentence() for _ in range(units)], needles, rng)
        else:
            rng.shuffle(sentences)
        asked = keys[: self.asked]
        wanted = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + f" and {asked[-1]}"
        return Prompt(
            f"Special {what}s are hidden in the following text. Remember them, you will be asked.",
            _documents(sentences),
            f"What are all the special {what}s for {wanted} in the text?",
            tuple(value for key in asked for value in values[key]),
        )


def variables(seed: int, units: int) -> Prompt:
    """A value handed on from variable to variable, four times; all of them are asked for."""
    rng = random.Random(f"variables {seed}")
    names = text.distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)), 5)
    value = str(rng.randint(10_000, 99_999))
    sentences = [f"VAR {names[0]} = {value}."]
    sentences += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
    hay = text.noise(rng)
    places = sorted(rng.sample(range(units + len(sentences)), len(sentences)))
    lines = [hay() for _ in range(units)]
    for place, sentence in zip(places, sentences, strict=True):
        lines.insert(place, sentence)
    return Prompt(
        "Remember the chain of variable assignments that is hidden in the following text.",
        _documents(lines),
        f"Which variables have the value {value} in the text? There are {len(names)}; name all.",
        tuple(names),
    )


def common_words(seed: int, units: int) -> Prompt:
    """Ten words of a numbered list that stand there more often than all others."""
    rng = random.Random(f"common words {seed}")
    often, seldom = (30, 3) if units >= 600 else (10, 1)
    more = max(1, (units - 10 * often) // seldom)
    source = list(islice(text.plain_words(rng), 10 + more))
    listed = source[:10] * often + source[10:] * seldom
    rng.shuffle(listed)
    numbered = [f"{number}. {word}" for number, word in enumerate(listed, 1)]
    return Prompt(
        "Below is a numbered list of words. Some of them come much more often than others.",
        _documents(numbered),
        "What are the 10 most common words in the list?",
        tuple(source[:10]),
    )


def frequent_words(seed: int, units: int) -> Prompt:
    """The three most frequent of many coded words, whose counts fall off as rank squared."""
    rng = random.Random(f"frequent words {seed}")
    ranks = max(8, units // 12)
    total = sum(rank**-2.0 for rank in range(1, ranks + 1))
    counts = [max(1, round(units * rank**-2.0 / total)) for rank in range(1, ranks + 1)]
    # in a short text the first three would come as often as others
    counts[:3] = [max(count, least) for count, least in zip(counts, (4, 3, 2), strict=False)]
    counts[3:] = [min(count, counts[2] - 1) for count in counts[3:]]
    source = text.distinct(lambda: text.coded_word(rng), ranks)
    stream = [word for word, count in zip(source, counts, strict=True) for _ in range(count)]
    rng.shuffle(stream)
    return Prompt(
        "Read the following coded text and keep track of how often each coded word comes.",
        _documents(stream),
        "What are the three most frequent words in the coded text?",
        tuple(source[:3]),
    )


def one_fact(seed: int, units: int) -> Prompt:
    """A fact in one of ``units`` documents."""
    return _asked(seed, units, bridge=False)


def two_facts(seed: int, units: int) -> Prompt:
    """Two facts in two of ``units`` documents, the first of which names whom the second is of."""
    return _asked(seed, max(2, units), bridge=True)


def _asked(seed: int, documents: int, bridge: bool) -> Prompt:
    rng = random.Random(f"question {seed}")
    config = WorldConfig(num_documents=documents, marks=(0, 0))
    for attempt in range(1000):
        world = make_world(seed + attempt * 1_000_003, config)
        facts = [placed.fact for placed in world.facts]
        pairs = [(one.fact, two.fact) for one, two in world.bridges]
        first, fact = rng.choice(pairs) if bridge and pairs else (None, rng.choice(facts))
        # a short value stands in many a wrong answer
        if len(fact.value) >= 4 and (first is not None or not bridge):
            subject = first.description() if first is not None else None
            question = fact.question(rng.choice(fact.relation.questions), subject)
            texts = tuple(document.text for document in world.documents)
            before = "Answer the question from the given documents, with the answer only."
            return Prompt(before, texts, question, (fact.value,))
    raise ValueError(f"no question over {documents} documents")


def _scatter(hay: list[str], needles: list[str], rng: random.Random) -> list[str]:
    """The needles, in random order, at random places in the hay."""
    mixed = list(hay)
    for needle in rng.sample(needles, len(needles)):
        mixed.insert(rng.randint(0, len(mixed)), needle)
    return mixed


def _documents(lines: list[str]) -> tuple[str, ...]:
    starts = range(0, len(lines), _PAGE)
    return tuple(" ".join(lines[start : start + _PAGE]) for start in starts)
