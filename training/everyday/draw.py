"""Draws what notes are about: words, names, things, and values of every kind.

No made-up name that is held out for evaluation is ever drawn.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from looseleaf_lab.evals.world import words as world_words
from looseleaf_lab.evals.world.names import is_held_out
from training.everyday import words

_ONSETS = words.listed(
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kn l m n p ph pl pr qu r s sc sh sk sl sm sn "
    "sp st str sw t th tr tw v w wh y z"
)
_VOWELS = words.listed("a e i o u a e i o u ai au ea ee ei ie oa oo ou y")
_CODAS = words.listed("b ck d f g l ll lt m mp n nd ng nk nt p r rd rk rn rt s sh ss st t th x z")
_BEFORE = words.listed(
    "in in in on on under behind near above below beside at inside next_to in_front_of on_top_of"
)


class Draw:
    """A source of words and values; `like` makes look-alikes of what was drawn before."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def one(self, options: tuple[str, ...]) -> str:
        return options[int(self.rng.random() * len(options))]

    def invented(self) -> str:
        """A pronounceable word of 2 to 12 letters."""
        rng = self.rng
        while True:
            word = ""
            for _ in range(rng.choice((1, 1, 2, 2, 2, 3, 3, 4))):
                word += self.one(_ONSETS) + self.one(_VOWELS)
                word += self.one(_CODAS) if rng.random() < 0.5 else ""
            if 2 <= len(word) <= 12 and not is_held_out(word.capitalize()):
                return word

    def noun(self) -> str:
        """A noun of everyday life, sometimes a compound or a word that nobody has heard of."""
        form = self.rng.random()
        if form < 0.62:
            return self.one(words.THINGS)
        if form < 0.72:
            return self.one(world_words.COMMON)
        if form < 0.80:
            return self.one(words.PLACES)
        return self.compound() if form < 0.88 else self.invented()

    def compound(self) -> str:
        first = self.one((*words.COLOURS, *words.THINGS, *words.SPOTS))
        return first + self.one(words.THINGS)

    def described(self, noun: str) -> str:
        """The noun, often with a word or two before it."""
        form = self.rng.random()
        if form < 0.5:
            return noun
        if form < 0.62:
            return f"{self.one(words.COLOURS)} {noun}"
        if form < 0.82:
            return f"{self.one(words.ADJECTIVES)} {noun}"
        return f"{self.one(words.THINGS)} {noun}"

    def thing(self) -> str:
        return self.described(self.noun())

    def plural(self) -> str:
        noun = self.one(words.PLURALS)
        return noun if self.rng.random() < 0.6 else f"{self.described(noun)}"

    def place(self) -> str:
        noun = self.invented() if self.rng.random() < 0.1 else self.one(words.PLACES)
        return self.described(noun)

    def name(self) -> str:
        """One capitalised word, known or made up."""
        form = self.rng.random()
        if form < 0.45:
            return self.one(words.FIRST_NAMES)
        if form < 0.6:
            return self.one(world_words.FIRST_NAMES)
        return self.invented().capitalize()

    def surname(self) -> str:
        known = self.rng.random() < 0.4
        return self.one(words.SURNAMES) if known else self.invented().capitalize()

    def person(self) -> str:
        form = self.rng.random()
        if form < 0.45:
            return self.name()
        if form < 0.8:
            return f"{self.name()} {self.surname()}"
        return f"{self.one(words.TITLES)} {self.surname()}"

    def somebody(self) -> str:
        """A person by name or otherwise."""
        form = self.rng.random()
        if form < 0.75:
            return self.person()
        if form < 0.82:
            return f"{self.one(('my', 'our', 'your', 'his', 'her'))} {self.one(words.KIN)}"
        if form < 0.92:
            whose = self.one(("the", "the", "the", "your", "our"))
            return f"{whose} {self.described(self.one(words.ROLES))}"
        return f"the {self.thing()} {self.one(('team', 'office', 'desk', 'group', 'company'))}"

    def holder(self) -> str:
        """What may have a wifi password or a colour: a place, a thing, a person."""
        form = self.rng.random()
        if form < 0.3:
            return f"the {self.place()}"
        if form < 0.6:
            return f"the {self.thing()}"
        if form < 0.9:
            return self.somebody()
        return f"{self.one(('room', 'flat', 'team', 'line', 'house'))} {self.code(3)}"

    def relation(self) -> str:
        form = self.rng.random()
        if form < 0.6:
            return self.one(words.RELATIONS)
        if form < 0.72:
            return f"{self.one(words.THINGS)} {self.one(words.RELATIONS)}"
        if form < 0.8:
            return f"favourite {self.one(words.LIKED)}"
        return self.noun() if form < 0.9 else f"{self.one(words.ADJECTIVES)} {self.noun()}"

    def role(self) -> str:
        return self.described(self.one(words.ROLES))

    def event(self) -> str:
        noun = self.one(words.EVENTS)
        form = self.rng.random()
        if form < 0.4:
            return noun
        first = words.ADJECTIVES if form < 0.6 else words.PLACES if form < 0.75 else words.THINGS
        return f"{self.one(first)} {noun}"

    # values ----------------------------------------------------------------------------------

    def digits(self, shortest: int, longest: int) -> str:
        count = self.rng.randint(shortest, longest)
        return "".join(self.rng.choices(string.digits, k=count))

    def count(self) -> str:
        return str(self.rng.randint(1, 10 ** self.rng.randint(1, 4)))

    def amount(self, units: tuple[str, ...] = words.UNITS) -> str:
        rng, form = self.rng, self.rng.random()
        number = self.one(words.NUMERALS) if form < 0.15 else self.count()
        if form > 0.9:
            number = f"{rng.randint(0, 99)}.{rng.randint(0, 99)}"
        return f"{number} {self.one(units)}"

    def clock(self) -> str:
        rng, form = self.rng, self.rng.random()
        if form < 0.65:
            return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
        if form < 0.8:
            return f"{rng.randint(1, 12)} {rng.choice(('am', 'pm', 'a.m', 'p.m'))}"
        return self.one(words.HOURS) if form < 0.93 else str(rng.randint(6, 22))

    def date(self) -> str:
        rng, form = self.rng, self.rng.random()
        month = self.one(world_words.MONTHS)
        if form < 0.35:
            return self.one(world_words.DAYS) + rng.choice(("", "", "s"))
        if form < 0.6:
            return f"{rng.randint(1, 31)} {month}"
        if form < 0.7:
            return f"{month} {rng.randint(1, 31)}"
        if form < 0.8:
            return f"{rng.randint(1, 31)} {month} {rng.randint(1950, 2035)}"
        return f"{self.one(world_words.DAYS)}, {rng.randint(1, 31)} {month}"

    def code(self, longest: int = 10) -> str:
        """Letters, digits and dashes."""
        rng = self.rng
        letters = rng.choice((string.ascii_uppercase, string.ascii_lowercase, "ABCDEF"))
        parts = []
        for _ in range(rng.randint(1, 1 if longest < 6 else 3)):
            kind = rng.random()
            if kind < 0.4 or longest < 6:
                parts.append(self.digits(1, min(longest, 5)))
            elif kind < 0.75:
                parts.append("".join(rng.choices(letters, k=rng.randint(1, 4))))
            else:
                parts.append(self.invented().capitalize())
        tail = rng.choice(letters) if rng.random() < 0.25 else ""
        return rng.choice(("-", "-", "-", "", "_", "/")).join(parts) + tail

    def phone(self) -> str:
        groups = [self.digits(2, 4) for _ in range(self.rng.randint(1, 3))]
        start = self.rng.choice(("0", "0", "0", "+", ""))
        return start + self.digits(2, 4) + self.rng.choice((" ", " ", "-")) + " ".join(groups)

    def address(self) -> str:
        """E-mail, web or host name."""
        domain = f"{self.invented()}.{self.one(words.ENDINGS)}"
        form = self.rng.random()
        if form < 0.5:
            first = self.one(words.FIRST_NAMES).lower() if form < 0.2 else self.invented()
            return f"{first}@{domain}"
        return f"www.{domain}" if form < 0.65 else f"{self.one(words.THINGS)}.{domain}"

    def phrase(self) -> str:
        """One to three words in lower case."""
        rng, form = self.rng, self.rng.random()
        if form < 0.3:
            return self.invented()
        if form < 0.5:
            return self.compound()
        if form < 0.62:
            return self.one((*words.COLOURS, *words.ADJECTIVES))
        if form < 0.75:
            return self.thing()
        if form < 0.85:
            return f"{self.noun()} and {self.noun()}"
        return " ".join(self.noun() for _ in range(rng.randint(2, 3)))

    def value(self) -> str:
        """Anything that may stand behind a colon."""
        kinds: tuple[tuple[float, Callable[[], str]], ...] = (
            (0.36, self.phrase), (0.46, self.code), (0.54, self.count), (0.63, self.amount),
            (0.69, self.date), (0.74, self.clock), (0.81, self.address), (0.85, self.phone),
            (0.91, self.person), (0.95, self.town), (1.01, lambda: self.invented().capitalize()),
        )  # fmt: skip
        form = self.rng.random()
        drawn = next(make for bound, make in kinds if form < bound)()
        return f'"{drawn}"' if self.rng.random() < 0.04 else drawn

    def town(self) -> str:
        form = self.rng.random()
        if form < 0.4:
            return self.one(words.TOWNS)
        if form < 0.7:
            return self.invented().capitalize()
        last = self.one(("Park", "Street", "Road", "Square", "Hill", "Lane", "Hall"))
        return f"{self.name()} {last}"

    def where(self) -> str:
        """A place with its preposition: "under the blue pot"."""
        form = self.rng.random()
        if form < 0.2:
            return f"{self.one(('in', 'in', 'at', 'near'))} {self.town()}"
        if form < 0.3:
            return f"in {self.one(('room', 'box', 'hall', 'building', 'row'))} {self.code(4)}"
        near = f"{self.one(_BEFORE)} the"
        noun = self.invented() if form > 0.94 else self.one(words.SPOTS)
        return f"{near} {self.described(noun)}"

    def when(self) -> str:
        """A time with its preposition: "on Sunday at 9:00"."""
        form = self.rng.random()
        if form < 0.4:
            return f"on {self.date()}"
        if form < 0.65:
            return f"at {self.clock()}"
        if form < 0.9:
            return f"on {self.date()} {'at ' if form < 0.82 else ''}{self.clock()}"
        month = self.one(world_words.MONTHS)
        return f"in {month}" if form < 0.95 else f"in {month} {self.rng.randint(1950, 2040)}"

    def like(self, text: str) -> str:
        """A look-alike: the same beginning, another end."""
        rng = self.rng
        keep = rng.randint(1, max(1, len(text) * 2 // 3))
        start = text[:keep].rstrip(" :@.-/_,")
        if not start or not text.replace(" ", "").isalnum() or " " in text[keep:]:
            return text
        if text[keep:].isdigit() or start[-1].isdigit():
            return start + self.digits(max(1, len(text) - keep), max(1, len(text) - keep))
        made = start + self.invented()[: rng.randint(1, 6)]
        return text if any(is_held_out(word.capitalize()) for word in made.split()) else made
