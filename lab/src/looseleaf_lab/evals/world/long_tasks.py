"""Long tasks over worlds: *roll-call* (many questions, one output), *needle* (one fact in a context
of any length), and several lookups of one world. Also two harder forms of short tasks:
*look-alike*, with a second fact that nearly matches, and *deep chain*."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from looseleaf_lab.evals.world.generate import World, WorldConfig, make_world
from looseleaf_lab.evals.world.tasks import Example, is_correct

CountTokens = Callable[[str], int]
"""Returns the number of tokens of a text; `count_words` does without a tokenizer."""

_INSTRUCTION = "Answer one by one:"
_RETRIES = 100
_STRIDE = 1_000_003
_PAGE_SENTENCES = 24
_LINE = re.compile(r"^\s*(\d+)[.)]\s*(.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class RollCall:
    """Numbered questions about one world, and their answers in order."""

    documents: tuple[str, ...]
    question: str
    lines: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The right output: one numbered line per question."""
        return "\n".join(f"{number}. {line}" for number, line in enumerate(self.lines, 1))


def count_words(text: str) -> int:
    """Estimated tokens of a text: four per three words."""
    return -(-4 * len(text.split()) // 3)


def make_roll_call(seed: int, lines: int = 40, num_documents: int = 50) -> RollCall:
    """The roll-call of this seed: ``lines`` questions about distinct facts, in random order.

    With 50 documents, facts spread over more than 4,000 tokens of the reference tokenizer, and 40
    answers have more than 600. Raises ValueError if no world of that size has enough facts.
    """
    rng = random.Random(f"roll-call {seed}")
    config = WorldConfig(num_documents=num_documents, marks=(0, 1), fillers=(1, 3))
    if lines < 1:
        raise ValueError("a roll-call needs at least one line")
    for attempt in range(_RETRIES):
        world = make_world(seed + attempt * _STRIDE, config)
        if len(world.facts) >= lines:
            return call_roll(world, lines, rng)
    raise ValueError(f"no world of {num_documents} documents has {lines} facts: ask for fewer")


def call_roll(world: World, lines: int, rng: random.Random) -> RollCall:
    """A roll-call of ``lines`` facts of this world, which must have enough facts."""
    facts = rng.sample([placed_fact.fact for placed_fact in world.facts], lines)
    questions = [fact.question(rng.choice(fact.relation.questions)) for fact in facts]
    numbered = [f"{number}. {text}" for number, text in enumerate(questions, 1)]
    question = "\n".join([_INSTRUCTION, *numbered])
    return RollCall(_texts(world), question, tuple(fact.answer() for fact in facts))


def numbered_lines(text: str) -> dict[int, str]:
    """The lines of an output by their numbers; the first line of a repeated number counts."""
    lines: dict[int, str] = {}
    for number, line in _LINE.findall(text):
        lines.setdefault(int(number), line)
    return lines


def lines_right(lines: Sequence[str], text: str) -> list[bool]:
    """For each line of a roll-call, whether it is exact, except for white space."""
    numbered = numbered_lines(text)
    return [is_correct(line, numbered.get(number, "")) for number, line in enumerate(lines, 1)]


def make_needle(
    seed: int, length: int, depth: float | None = None, count: CountTokens = count_words
) -> Example:
    """One fact among idle sentences: about ``length`` tokens by ``count``, in documents of a page.

    ``depth`` is the relative position of the fact, from 0 to 1. By default it is the seed modulo
    11, in tenths, so that eleven adjacent seeds cover all depths."""
    if length < 1:
        raise ValueError("a needle's context needs at least one token")
    if depth is not None and not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth is from 0 to 1, not {depth}")
    position = (seed % 11) / 10 if depth is None else depth
    rng = random.Random(f"needle {seed}")
    # the needle is the world's only fact in the text; the hay is idle sentences
    world = make_world(seed, WorldConfig(num_documents=1, marks=(0, 0), fillers=(0, 0)))
    fact = rng.choice(world.facts).fact
    needle = fact.state(rng.choice(fact.relation.statements))
    hay = _hay(world.filler.idle, length - count(needle), count)
    hay.insert(round(position * len(hay)), needle)
    question = fact.question(rng.choice(fact.relation.questions))
    return Example(_pages(hay), question, fact.answer(), "needle", 0)


def make_needles(
    seed: int, length: int, needles: int, count: CountTokens = count_words
) -> list[Example]:
    """``needles`` facts in one context of about ``length`` tokens, at equal distances from its
    beginning to its end, with one question each.

    Raises ValueError if the facts leave no room for hay."""
    if needles < 1:
        raise ValueError("a context without a needle has nothing to ask for")
    rng = random.Random(f"needles {seed}")
    config = WorldConfig(num_documents=needles, marks=(0, 0), fillers=(0, 0))
    world = make_world(seed, config)
    facts = [placed_fact.fact for placed_fact in rng.sample(world.facts, needles)]
    statements = [fact.state(rng.choice(fact.relation.statements)) for fact in facts]
    room = length - count(" ".join(statements))
    if room < 1:
        raise ValueError(f"{needles} needles do not fit into {length} tokens: ask for fewer")
    text = _hay(world.filler.idle, room, count)
    positions = [round(n * len(text) / max(1, needles - 1)) for n in range(needles)]
    # in descending order, so that an insertion shifts no later position
    for position, needle in sorted(zip(positions, statements, strict=True), reverse=True):
        text.insert(position, needle)
    pages = _pages(text)
    questions = [fact.question(rng.choice(fact.relation.questions)) for fact in facts]
    return [
        Example(pages, question, fact.answer(), "needle", 0)
        for question, fact in zip(questions, facts, strict=True)
    ]


def make_lookups(seed: int, questions: int, num_documents: int) -> list[Example]:
    """Separate questions about ``questions`` distinct facts of this seed's world.

    Raises ValueError if the world has fewer facts."""
    world = make_world(seed, WorldConfig(num_documents=num_documents))
    if len(world.facts) < questions:
        raise ValueError(
            f"a world of {num_documents} documents has {len(world.facts)} facts: ask for fewer"
        )
    rng = random.Random(f"lookups {seed}")
    facts = [placed_fact.fact for placed_fact in rng.sample(world.facts, questions)]
    texts = _texts(world)
    return [
        Example(
            texts, fact.question(rng.choice(fact.relation.questions)), fact.answer(), "lookup", 0
        )
        for fact in facts
    ]


def _hay(sentence: Callable[[], str], length: int, count: CountTokens) -> list[str]:
    """Sentences with at least ``length`` tokens in all, and hardly more."""
    hay: list[str] = []
    while (missing := length - count(" ".join(hay))) > 0:
        # counts of single sentences add up to more than their joint count, so the loop repeats
        while missing > 0:
            hay.append(sentence())
            missing -= count(hay[-1])
    return hay


def make_look_alike(seed: int, num_documents: int = 6) -> Example:
    """A lookup of a fact that has a look-alike, in a world with many of them."""
    rng = random.Random(f"look-alike {seed}")
    config = WorldConfig(num_documents=num_documents, look_alikes=0.5)
    for attempt in range(_RETRIES):
        world = make_world(seed + attempt * _STRIDE, config)
        if world.look_alikes:
            fact = rng.choice(rng.choice(world.look_alikes)).fact
            question = fact.question(rng.choice(fact.relation.questions))
            return Example(_texts(world), question, fact.answer(), "look-alike", 0)
    raise ValueError(f"no look-alike in worlds of {num_documents} documents")


def make_deep_chain(seed: int, hops: int = 4, num_documents: int = 6) -> Example:
    """A chain through more documents than in the standard task; the question is about its end."""
    config = WorldConfig(num_documents=num_documents, hops=hops, max_hops=hops)
    rng = random.Random(f"deep chain {seed}")
    world = make_world(seed, config)
    fact = rng.choice([mark for mark in world.marks if mark.hops == hops]).fact
    question = fact.question(rng.choice(fact.relation.questions))
    return Example(_texts(world), question, fact.answer(), "chain", hops)


def _pages(sentences: list[str]) -> tuple[str, ...]:
    """Documents of `_PAGE_SENTENCES` sentences each."""
    starts = range(0, len(sentences), _PAGE_SENTENCES)
    return tuple(" ".join(sentences[start : start + _PAGE_SENTENCES]) for start in starts)


def _texts(world: World) -> tuple[str, ...]:
    return tuple(document.text for document in world.documents)
