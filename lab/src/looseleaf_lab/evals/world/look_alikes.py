"""Facts that nearly match another fact: the same relation with a subject that differs in one word.

A model that reads only a part of the subject, e.g. the first name, gives the wrong value."""

from __future__ import annotations

from looseleaf_lab.evals.world import words
from looseleaf_lab.evals.world.draw import FactDrawer
from looseleaf_lab.evals.world.relations import DUTY, HEAD, KIN, PERSON_ATTRIBUTES, Fact

_WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "room": (words.ROOM_FIRST, words.ROOMS),
    "event": (words.TOPIC_FIRST, words.EVENTS),
    "price": (words.ADJECTIVES, words.THINGS),
}
_ATTEMPTS = 20


def look_alike(drawer: FactDrawer, fact: Fact) -> Fact | None:
    """A new fact that resembles ``fact``, with another value; None if there is none."""
    for _ in range(_ATTEMPTS):
        slots = _similar_slots(drawer, fact)
        if slots is None:
            return None
        value = _value(drawer, fact)
        candidate = Fact(fact.relation, slots, value)
        if value != fact.value and drawer.claim(candidate):
            return candidate
    return None


def _similar_slots(drawer: FactDrawer, fact: Fact) -> dict[str, str] | None:
    """The slots of ``fact`` with one word of the subject changed; None if there is no such word."""
    rng, slots, relation = drawer.rng, dict(fact.slots), fact.relation
    if relation in PERSON_ATTRIBUTES:
        slots["s"] = _namesake(drawer, slots["s"])
    elif relation is DUTY:
        slots["v"], slots["p"] = rng.choice(words.DUTY_VERBS)
    elif relation is HEAD:
        slots["s"] = f"{slots['s'].rsplit(' ', 1)[0]} {rng.choice(words.ORGS)}"
    elif relation.name in _WORDS:
        first, last = _WORDS[relation.name]
        subject_words = slots["s"].split(" ")
        if subject_words[-1] not in last:
            return None
        slots["s"] = f"{rng.choice(first)} {subject_words[-1]}"
    elif "n" in slots:
        choices = words.GOODS if relation.name == "count" else words.ATTRIBUTE_NOUNS
        slots["n"] = rng.choice(choices)
    else:
        return None
    return slots


def _namesake(drawer: FactDrawer, person: str) -> str:
    """A new person who shares the first or the last name."""
    names = person.split(" ")
    if len(names) != 2:
        return drawer.person()
    keeps_first = drawer.rng.random() < 0.5
    while True:
        new_name = drawer.name()
        full_name = f"{names[0]} {new_name}" if keeps_first else f"{new_name} {names[1]}"
        if full_name not in drawer.people:
            drawer.people.append(full_name)
            return full_name


def _value(drawer: FactDrawer, fact: Fact) -> str:
    """Another value of the same kind as the value of ``fact``."""
    rng, relation = drawer.rng, fact.relation
    if relation in (KIN, DUTY, HEAD):
        return drawer.known_or_new_person()
    if fact.value.isdigit():
        return drawer.digits(len(fact.value), len(fact.value))
    lists = {"trade": words.TRADES, "instrument": words.INSTRUMENTS, "event": words.DAYS}
    if relation.name in lists:
        return rng.choice(lists[relation.name])
    return drawer.name()
