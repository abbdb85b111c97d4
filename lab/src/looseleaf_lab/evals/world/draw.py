"""Draws the entities and facts of one world, each subject at most once. Writes no documents."""

from __future__ import annotations

import random
from collections.abc import Callable

from looseleaf_lab.evals.world import words
from looseleaf_lab.evals.world.names import fresh_name, name_pool
from looseleaf_lab.evals.world.relations import (
    ATTRIBUTE,
    COUNT,
    DUTY,
    EVENT,
    HEAD,
    KIN,
    PERSON_ATTRIBUTES,
    PRICE,
    ROOM,
    TRADE,
    Fact,
    Relation,
)

_START = 3  # number of initial letters that differ between names of one world
_FRESH = 0.4  # share of names in training worlds that are outside of the pool


class FactDrawer:
    """A source of fresh entities and facts for one world."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out
        self.people: list[str] = []
        self._names = name_pool(held_out)
        self._used_starts: set[str] = set()
        self._kinds_of_site: list[str] = []
        self._claimed_keys: set[tuple[str, ...]] = set()

    def name(self) -> str:
        """A made-up name whose first letters are new in this world, if one is found."""
        for _ in range(30):
            is_fresh = not self.held_out and self.rng.random() < _FRESH
            name = fresh_name(self.rng) if is_fresh else self.rng.choice(self._names)
            if name[:_START] not in self._used_starts:
                break
        self._used_starts.add(name[:_START])
        return name

    def person(self) -> str:
        """A new full name; some share a first or a last name with another person."""
        rng = self.rng
        while True:
            first = rng.choice(words.FIRST_NAMES) if rng.random() < 0.2 else self.name()
            last = self.name()
            if self.people and rng.random() < 0.1:
                other_first, other_last = rng.choice(self.people).split(" ")
                if rng.random() < 0.5:
                    first = other_first
                else:
                    last = other_last
            person = f"{first} {last}"
            if person not in self.people:
                self.people.append(person)
                return person

    def known_or_new_person(self) -> str:
        """A person of this world, or a new one."""
        if self.people and self.rng.random() < 0.5:
            return self.rng.choice(self.people)
        return self.person()

    def organisation(self) -> str:
        return f"the {self.name()} {self.rng.choice(words.ORGS)}"

    def site(self) -> str:
        return f"{self.name()} {self.rng.choice(words.SITES)}"

    def marked_site(self) -> str:
        """A site whose kind is new among marked sites, until all kinds are used."""
        if not self._kinds_of_site:
            self._kinds_of_site = self.rng.sample(words.SITES, len(words.SITES))
        return f"{self.name()} {self._kinds_of_site.pop()}"

    def digits(self, shortest: int = 2, longest: int = 4) -> str:
        rng = self.rng
        num_more = rng.randint(shortest, longest) - 1
        return str(rng.randint(1, 9)) + "".join(str(rng.randint(0, 9)) for _ in range(num_more))

    def _day(self) -> str:
        rng = self.rng
        form = rng.random()
        if form < 0.5:
            return rng.choice(words.DAYS)
        if form < 0.75:
            return f"{rng.choice(words.DAYS)} at {rng.randint(7, 19)}:{rng.choice('0134')}0"
        return f"{rng.randint(1, 28)} {rng.choice(words.MONTHS)}"

    def _spot(self) -> str:
        rng = self.rng
        form = rng.random()
        if form < 0.4:
            return f"the {rng.choice(words.ROOM_FIRST)} {rng.choice(words.SPOTS)}"
        if form < 0.7:
            return self.site()
        return f"room {self.digits()}" if form < 0.85 else self.name()

    def _any_value(self) -> str:
        rng = self.rng
        form = rng.random()
        if form < 0.3:
            return self.digits()
        if form < 0.5:
            return self.name()
        if form < 0.65:
            return self.person()
        if form < 0.85:
            return rng.choice(words.COMMON)
        return f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.COMMON)}"

    def _any_subject(self) -> str:
        rng = self.rng
        makers: tuple[Callable[[], str], ...] = (
            self.organisation, self.site, self.known_or_new_person, self.name,
            lambda: f"the {rng.choice(words.ADJECTIVES)} {rng.choice(words.COMMON)}",
            lambda: f"the {rng.choice(words.COMMON)}",
        )  # fmt: skip
        return rng.choice(makers)()

    def claim(self, fact: Fact) -> bool:
        """Reserve the subject of a fact; False if this world already has a fact about it."""
        if fact.key in self._claimed_keys:
            return False
        self._claimed_keys.add(fact.key)
        return True

    def _fresh(self, make: Callable[[], Fact]) -> Fact:
        while True:
            fact = make()
            if self.claim(fact):
                return fact

    def about_person(self, person: str) -> Fact:
        """A new fact about this person."""
        return self._fresh(lambda: self._draw_about(person))

    def _draw_about(self, person: str) -> Fact:
        relation = self.rng.choice(PERSON_ATTRIBUTES)
        if relation is KIN:
            kin = self.rng.choice(words.KIN)
            return Fact(relation, {"s": person, "k": kin}, self.person())
        return Fact(relation, {"s": person}, self._value(relation))

    def _value(self, relation: Relation) -> str:
        rng = self.rng
        if relation is TRADE:
            return rng.choice(words.TRADES)
        if relation.name == "instrument":
            return rng.choice(words.INSTRUMENTS)
        if relation.name in ("extension", "desk"):
            return self.digits(3, 4) if relation.name == "extension" else self.digits(2, 3)
        return self.name()

    def naming_person(self) -> Fact:
        """A new fact whose value is a person: the first half of a bridge."""
        return self._fresh(self._draw_naming)

    def _draw_naming(self) -> Fact:
        rng = self.rng
        form = rng.random()
        if form < 0.45:
            verb, participle = rng.choice(words.DUTY_VERBS)
            if rng.random() < 0.85:
                topic = f"{rng.choice(words.TOPIC_FIRST)} {rng.choice(words.TOPIC_LAST)}"
            else:
                topic = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.GOODS)}"
            return Fact(DUTY, {"s": topic, "v": verb, "p": participle}, self.known_or_new_person())
        if form < 0.6:
            return Fact(HEAD, {"s": self.organisation()}, self.known_or_new_person())
        subject = self.known_or_new_person()
        value = self.known_or_new_person()
        while value == subject:
            value = self.known_or_new_person()
        return Fact(KIN, {"s": subject, "k": rng.choice(words.KIN)}, value)

    def about_thing(self) -> Fact:
        """A new fact about a thing, a place, an event or an organisation."""
        return self._fresh(self._draw_about_thing)

    def _draw_about_thing(self) -> Fact:
        rng = self.rng
        form = rng.random()
        if form < 0.2:
            return Fact(ROOM, {"s": self._word_pair(words.ROOM_FIRST, words.ROOMS)}, self._spot())
        if form < 0.4:
            return Fact(EVENT, {"s": self._word_pair(words.TOPIC_FIRST, words.EVENTS)}, self._day())
        if form < 0.5:
            return Fact(
                PRICE, {"s": self._word_pair(words.ADJECTIVES, words.THINGS)}, self.digits(1, 3)
            )
        if form < 0.6:
            location = self.site() if rng.random() < 0.5 else self.name()
            return Fact(COUNT, {"s": location, "n": rng.choice(words.GOODS)}, self.digits(1, 3))
        noun = rng.choice(words.ATTRIBUTE_NOUNS)
        if rng.random() < 0.2:
            noun = f"{rng.choice(words.ADJECTIVES)} {noun}"
        return Fact(ATTRIBUTE, {"s": self._any_subject(), "n": noun}, self._any_value())

    def _word_pair(self, first: tuple[str, ...], last: tuple[str, ...]) -> str:
        rng = self.rng
        return (
            f"{rng.choice(first)} {rng.choice(last)}" if rng.random() < 0.75 else rng.choice(last)
        )
