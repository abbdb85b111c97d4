"""Prompts of the task types, each from a seed and a number of units of hay.

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

_PAGE = 40  # sentences or words of hay per document


@dataclass(frozen=True)
class Prompt:
    """Text, question, and the strings that an answer must contain."""

    before: str
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


Build = Callable[[int, int], Prompt]
"""Returns the prompt of a seed with a number of units of hay."""


@dataclass(frozen=True)
class Needles:
    """``num_queried`` keys with ``values`` each, and ``keys`` distracting needles."""

    hay: Literal["noise", "essay", "needles"]
    keys: int = 0
    values: int = 1
    num_queried: int = 1
    uuid_keys: bool = False
    uuid_values: bool = False

    def __call__(self, seed: int, units: int) -> Prompt:
        """A prompt with the needles at random positions in ``units`` sentences."""
        rng = random.Random(f"needles {seed}")
        make_key = text.identifier if self.uuid_keys else text.key_of_words
        make_value = text.identifier if self.uuid_values else text.number
        num_distractors = self.keys + (units if self.hay == "needles" else 0)
        keys = text.distinct(lambda: make_key(rng), self.num_queried + num_distractors)
        values = {key: [make_value(rng)] for key in keys}
        for key in keys[: self.num_queried]:
            values[key] = text.distinct(lambda: make_value(rng), self.values)
        value_kind = "identifier" if self.uuid_values else "number"
        needles = [
            f"One of the special {value_kind}s for {key} is {value}."
            for key in keys
            for value in values[key]
        ]
        sentences = needles
        if self.hay != "needles":
            sentence = text.noise(rng) if self.hay == "noise" else text.essay(rng)
            sentences = _insert_at_random([sentence() for _ in range(units)], needles, rng)
        else:
            rng.shuffle(sentences)
        queried_keys = keys[: self.num_queried]
        key_list = (
            queried_keys[0]
            if len(queried_keys) == 1
            else ", ".join(queried_keys[:-1]) + f" and {queried_keys[-1]}"
        )
        return Prompt(
            f"Special {value_kind}s are hidden in the following text. "
            "Remember them, you will be asked.",
            _documents(sentences),
            f"What are all the special {value_kind}s for {key_list} in the text?",
            tuple(value for key in queried_keys for value in values[key]),
        )


def variables(seed: int, units: int) -> Prompt:
    """A value that is assigned from variable to variable, four times; the answer has all names."""
    rng = random.Random(f"variables {seed}")
    names = text.distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)), 5)
    value = str(rng.randint(10_000, 99_999))
    sentences = [f"VAR {names[0]} = {value}."]
    sentences += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
    hay = text.noise(rng)
    positions = sorted(rng.sample(range(units + len(sentences)), len(sentences)))
    lines = [hay() for _ in range(units)]
    for position, sentence in zip(positions, sentences, strict=True):
        lines.insert(position, sentence)
    return Prompt(
        "Remember the chain of variable assignments that is hidden in the following text.",
        _documents(lines),
        f"Which variables have the value {value} in the text? There are {len(names)}; name all.",
        tuple(names),
    )


def common_words(seed: int, units: int) -> Prompt:
    """A numbered list with ten words that are more frequent than all others."""
    rng = random.Random(f"common words {seed}")
    high_count, low_count = (30, 3) if units >= 600 else (10, 1)
    num_rare = max(1, (units - 10 * high_count) // low_count)
    source = list(islice(text.plain_words(rng), 10 + num_rare))
    word_list = source[:10] * high_count + source[10:] * low_count
    rng.shuffle(word_list)
    numbered = [f"{number}. {word}" for number, word in enumerate(word_list, 1)]
    return Prompt(
        "Below is a numbered list of words. Some of them come much more often than others.",
        _documents(numbered),
        "What are the 10 most common words in the list?",
        tuple(source[:10]),
    )


def frequent_words(seed: int, units: int) -> Prompt:
    """The three most frequent of many coded words, whose counts fall with the squared rank."""
    rng = random.Random(f"frequent words {seed}")
    ranks = max(8, units // 12)
    total = sum(rank**-2.0 for rank in range(1, ranks + 1))
    counts = [max(1, round(units * rank**-2.0 / total)) for rank in range(1, ranks + 1)]
    # in a short text the first three would not be the most frequent
    counts[:3] = [max(count, minimum) for count, minimum in zip(counts, (4, 3, 2), strict=False)]
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
    """A question about a fact in one of ``units`` documents."""
    return _world_question(seed, units, bridge=False)


def two_facts(seed: int, units: int) -> Prompt:
    """A question over two facts in two of ``units`` documents: the first names the second's
    subject."""
    return _world_question(seed, max(2, units), bridge=True)


def _world_question(seed: int, documents: int, bridge: bool) -> Prompt:
    rng = random.Random(f"question {seed}")
    config = WorldConfig(num_documents=documents, marks=(0, 0))
    for attempt in range(1000):
        world = make_world(seed + attempt * 1_000_003, config)
        facts = [placed_fact.fact for placed_fact in world.facts]
        pairs = [(first.fact, second.fact) for first, second in world.bridges]
        first, fact = rng.choice(pairs) if bridge and pairs else (None, rng.choice(facts))
        # wrong answers often contain a short value
        if len(fact.value) >= 4 and (first is not None or not bridge):
            subject = first.description() if first is not None else None
            question = fact.question(rng.choice(fact.relation.questions), subject)
            texts = tuple(document.text for document in world.documents)
            instruction = "Answer the question from the given documents, with the answer only."
            return Prompt(instruction, texts, question, (fact.value,))
    raise ValueError(f"no question over {documents} documents")


def _insert_at_random(hay: list[str], needles: list[str], rng: random.Random) -> list[str]:
    """The hay with the needles in random order at random positions."""
    mixed = list(hay)
    for needle in rng.sample(needles, len(needles)):
        mixed.insert(rng.randint(0, len(mixed)), needle)
    return mixed


def _documents(lines: list[str]) -> tuple[str, ...]:
    starts = range(0, len(lines), _PAGE)
    return tuple(" ".join(lines[start : start + _PAGE]) for start in starts)
