"""Questions over a world, the tasks that use them, and the scorer, without a model.

A new task is one more function in `_ASK` that returns a `Question` about a world.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from looseleaf_lab.evals.world import words
from looseleaf_lab.evals.world.generate import PlacedFact, World, WorldConfig, make_world
from looseleaf_lab.evals.world.relations import DUTY, MARK, PERSON_ATTRIBUTES, Fact

NO_ANSWER = "The documents do not say."


@dataclass(frozen=True)
class Question:
    """A question, its answer of one or two sentences, its task, and its number of hops."""

    text: str
    answer: str
    task: str
    hops: int = 0


@dataclass(frozen=True)
class Example:
    """One scored question with its documents."""

    documents: tuple[str, ...]
    question: str
    answer: str
    task: str
    hops: int


def _fact_question(placed_fact: PlacedFact, rng: random.Random, task: str = "lookup") -> Question:
    fact = placed_fact.fact
    text = fact.question(rng.choice(fact.relation.questions))
    return Question(text, fact.answer(), task, placed_fact.hops)


def _lookup(world: World, rng: random.Random, hops: int | None) -> Question | None:
    return _fact_question(rng.choice(world.facts), rng) if world.facts else None


def _mark(world: World, rng: random.Random, hops: int | None) -> Question | None:
    """A mark with its value in its own document: a chain without hops."""
    plain_marks = [mark for mark in world.marks if mark.hops == 0]
    return _fact_question(rng.choice(plain_marks), rng) if plain_marks else None


def _bridge(world: World, rng: random.Random, hops: int | None) -> Question | None:
    if not world.bridges:
        return None
    first, second = (placed_fact.fact for placed_fact in rng.choice(world.bridges))
    text = second.question(rng.choice(second.relation.questions), first.description())
    return Question(text, f"{first.answer()} {second.answer()}", "bridge", 2)


def _chain(world: World, rng: random.Random, hops: int | None) -> Question | None:
    lengths = sorted({mark.hops for mark in world.marks if mark.hops > 0})
    if hops is None and lengths:
        hops = rng.choice(lengths)
    chain_ends = [mark for mark in world.marks if mark.hops == hops]
    return _fact_question(rng.choice(chain_ends), rng, "chain") if hops and chain_ends else None


def _unanswerable(world: World, rng: random.Random, hops: int | None) -> Question | None:
    """An unknown name, an unstated fact about a known person, a broken bridge, or foreign text."""
    drawer = world.drawer
    form = rng.random()
    if form < 0.35 and drawer.people:
        fact = drawer.about_person(rng.choice(drawer.people))
        text = fact.question(rng.choice(fact.relation.questions))
        person_facts = [p.fact for p in world.facts if p.fact.relation.description]
        if person_facts and rng.random() < 0.3:
            first = rng.choice(person_facts)
            if _is_unstated(world, first.value, fact):
                text = fact.question(rng.choice(fact.relation.questions), first.description())
    elif form < 0.5:
        fact = _near_miss(world, rng) or rng.choice((drawer.naming_person, drawer.about_thing))()
        text = fact.question(rng.choice(fact.relation.questions))
    elif form < 0.6:
        fact = Fact(MARK, {"s": drawer.site(), "k": rng.choice(words.MARK_KINDS)}, "")
        if not drawer.claim(fact):
            return None
        text = fact.question(rng.choice(MARK.questions))
    elif form < 0.7:
        fact = drawer.about_person(drawer.naming_person().description())
        text = fact.question(rng.choice(fact.relation.questions))
    else:
        text = world.filler.foreign_question()
    return Question(text, NO_ANSWER, "unanswerable")


def _near_miss(world: World, rng: random.Random) -> Fact | None:
    """A stated duty with another verb, which no document states."""
    duties = [p.fact for p in world.facts if p.fact.relation is DUTY]
    if not duties or rng.random() < 0.3:
        return None
    verb, participle = rng.choice(words.DUTY_VERBS)
    fact = Fact(DUTY, {"s": rng.choice(duties).slots["s"], "v": verb, "p": participle}, "")
    return fact if world.drawer.claim(fact) else None


def _is_unstated(world: World, person: str, template: Fact) -> bool:
    key = Fact(template.relation, {**template.slots, "s": person}, "").key
    return template.relation in PERSON_ATTRIBUTES and all(p.fact.key != key for p in world.facts)


_ASK: MappingProxyType[str, Callable[[World, random.Random, int | None], Question | None]] = (
    MappingProxyType(
        {
            "lookup": _lookup,
            "bridge": _bridge,
            "chain": _chain,
            "mark": _mark,
            "unanswerable": _unanswerable,
        }
    )
)

TASKS: tuple[str, ...] = ("lookup", "bridge", "chain", "unanswerable")


def ask(world: World, task: str, rng: random.Random, hops: int | None = None) -> Question | None:
    """A question of this task about the world, or None if the world has none."""
    return _ASK[task](world, rng, hops)


def make_example(task: str, seed: int, num_documents: int = 6, hops: int | None = None) -> Example:
    """The example of this seed; equal arguments always give the same example.

    ``hops`` is for `chain` only: the number of documents that pass the value on (1 to 3; by default
    drawn from the seed).
    """
    if task not in _ASK:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    if hops is not None and task != "chain":
        raise ValueError(f"hops belong to the task chain, not to {task}")
    rng = random.Random(f"{task} {seed}")
    if task == "chain" and hops is None:
        hops = rng.randint(1, min(3, num_documents - 1))
    config = WorldConfig(num_documents=num_documents, hops=hops)
    for attempt in range(100):
        # a large stride keeps retries of one seed apart from other small seeds
        world = make_world(seed if attempt == 0 else seed + attempt * 1_000_003, config)
        question = ask(world, task, rng, hops)
        if question is not None:
            texts = tuple(document.text for document in world.documents)
            return Example(texts, question.text, question.answer, question.task, question.hops)
    raise ValueError(f"no {task} question fits {config}")


def is_correct(answer: str, text: str) -> bool:
    """Exact match with the expected answer, except for white space."""
    return text.split() == answer.split()
