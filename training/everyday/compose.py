"""Composes notes out of facts, in the layouts that people use, and asks about them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from looseleaf_lab.evals.world import NO_ANSWER
from looseleaf_lab.evals.world import words as world_words
from looseleaf_lab.evals.world.filler import Filler
from training.everyday import words
from training.everyday.draw import Draw
from training.everyday.families import ATTRIBUTE, TOPICAL, Family
from training.everyday.makers import Forms
from training.everyday.places import FAMILIES

_FIELD = re.compile(r"\{(\w+)\}")
_FACTS = (1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 9, 14)
_NUM_NOTES = (1, 1, 1, 1, 1, 2, 2, 3, 4)
_TITLES = (
    "notes", "to do", "reminder", "meeting notes, {date}", "hello everyone,", "dear all,",
    "{event}",
    "{thing}", "house rules", "contacts", "phone numbers", "important", "{date}", "minutes, {date}",
    "{place} information", "checklist", "shopping", "prices", "timetable", "{invented} {thing}",
    "who does what", "hi {name},", "welcome to the {place}!", "recipe for {thing}", "info",
    "present: {name}, {name}, {name}",
)  # fmt: skip
_IDLE = (
    "bring your own {thing}.", "please {verb} the {thing} before you leave.", "thank you!",
    "we had a lovely time in {town}.", "do not {verb} the {thing}.", "nothing else was discussed.",
    "if it rains we stay in the {place}.", "{name} and {name} were there too.", "see you soon!",
    "the {thing} needs a new {thing}.", "more about the {thing} next week.", "it was {adjective}.",
    "the {thing} and the {thing} are {adjective}.", "{verb} the {thing} in the {place}.",
    "let me know if you have questions.", "children like the {thing}.", "there is no {thing}.",
    "{name} asked about the {thing}.", "remember to {verb} the {plural}.", "best wishes, {name}",
)  # fmt: skip

_ARTICLES = ("the ", "my ", "our ", "your ", "his ", "her ")
_FOLLOWING = (
    "its {r} is {o}.", "its {r} is {o}.", "it has the {r} {o}.", "the {r} is {o}.",
    "{o} is its {r}.", "his {r} is {o}.", "her {r} is {o}.",
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """One thing that a note says."""

    family: Family
    slots: dict[str, Forms]
    values: Forms

    def fields(self) -> Forms:
        merged: Forms = {}
        for forms in (*self.slots.values(), self.values):
            merged |= forms
        return merged

    def agrees(self, other: Fact, slots: set[str]) -> bool:
        """Whether both may be meant by a question that names only these slots."""
        return self.family.group == other.family.group and all(
            slot not in other.slots or _noun(self.slots[slot]) == _noun(other.slots[slot])
            for slot in slots
        )


@dataclass(frozen=True)
class Note:
    """Texts, and what may be asked of them: question, answer, and whether they answer it."""

    texts: tuple[str, ...]
    asked: tuple[tuple[str, str, bool], ...]


def _noun(forms: Forms) -> str:
    """What tells one slot from another: its first form, without the article."""
    return next(iter(forms.values()))[0].removeprefix("the ")


def _recast(forms: Forms) -> dict[str, Forms]:
    """The same thing or person, in the forms of every slot that may hold it."""
    text = next(iter(forms.values()))[0]
    if not text.startswith("the "):
        return {"s": {"s": (text,)}, "p": {"p": (text,)}}
    bare = text.removeprefix("the ")
    target = {"x": (text,), "x0": (bare,), "be": ("is",), "do": ("does",), "was": ("was",)}
    return {"s": {"s": (text,), "s0": (bare,)}, "p": {"p": (text,)}, "x": target}


def _lowered(forms: Forms) -> Forms:
    return {field: tuple(text.lower() for text in texts) for field, texts in forms.items()}


class Composer:
    """Writes the notes of one sample and the questions about them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.draw = rng, Draw(rng)
        self.filler = Filler(rng, self.draw.name)
        self.facts: list[Fact] = []
        self.careless = rng.random() < 0.14  # sentences begin small
        self.lower = self.careless and rng.random() < 0.5  # no capitals at all

    # facts -------------------------------------------------------------------------------------

    def _make(self, family: Family, given: dict[str, Forms] | None = None) -> Fact:
        drawn = {slot: make(self.draw) for slot, make in family.slots.items()}
        fact = Fact(family, {**drawn, **(given or {})}, family.values(self.draw))
        if not self.lower:
            return fact
        slots = {slot: _lowered(forms) for slot, forms in fact.slots.items()}
        return Fact(family, slots, _lowered(fact.values))

    def _sibling(self, fact: Fact) -> Fact:
        """The same but for one slot, sometimes with a value that looks alike."""
        other = self._make(fact.family)
        slots = dict(fact.slots)
        if slots:
            changed = self.rng.choice(sorted(slots))
            slots[changed] = other.slots[changed]
        values = other.values
        if self.rng.random() < 0.3 and list(fact.values) == ["o"]:
            values = {"o": (self.draw.like(fact.values["o"][0]),)}
        return Fact(fact.family, slots, values)

    def _add(self, make: Callable[[], Fact]) -> Fact | None:
        """A fact of which nothing is said yet, or None if none is found soon."""
        for _ in range(5):
            fact = make()
            if not any(fact.agrees(other, set(fact.slots)) for other in self.facts):
                self.facts.append(fact)
                return fact
        return None

    # text --------------------------------------------------------------------------------------

    def fill(self, template: str, fields: Forms) -> str:
        chosen = {name: self.draw.one(options) for name, options in fields.items()}
        return template.format(**chosen)

    def _usable(self, templates: tuple[str, ...], fact: Fact) -> str:
        fields = fact.fields()
        return self.draw.one(
            tuple(t for t in templates if all(field in fields for field in _FIELD.findall(t)))
        )

    def _state(self, fact: Fact, templates: tuple[str, ...] = ()) -> str:
        template = self._usable(templates or fact.family.statements, fact)
        fields = fact.fields()
        if self.rng.random() < 0.06:  # more is said of the subject than the question will repeat
            post = self.draw.one((self.draw.where(), f"from {self.draw.town()}"))
            fields |= {
                name: (f"{fields[name][0]} {post}",)
                for name in ("s", "x")
                if fields.get(name, ("",))[0].startswith("the ")
            }
        text = self.fill(template, fields)
        # a value keeps its spelling, so that it can be copied
        spelled = template.startswith("{o}") and not text.startswith(_ARTICLES)
        return text if spelled else self._sentence(text)

    def _sentence(self, text: str) -> str:
        return text if self.careless else text[0].upper() + text[1:]

    def _line(self, fact: Fact) -> str:
        if self.rng.random() < 0.2:
            return self._state(fact).rstrip(".")
        text = self.fill(self._usable(fact.family.lines, fact), fact.fields())
        return text[0].upper() + text[1:] if not self.careless and self.rng.random() < 0.6 else text

    def _idle(self, templates: tuple[str, ...] = _IDLE) -> str:
        draw = self.draw
        makers: dict[str, Callable[[], str]] = {
            "thing": draw.thing, "date": draw.date, "event": draw.event, "place": draw.place,
            "invented": draw.invented, "name": draw.name, "town": draw.town, "plural": draw.plural,
            "verb": lambda: draw.one(words.REGULAR),
            "adjective": lambda: draw.one(world_words.ADJECTIVES),
        }  # fmt: skip
        text = _FIELD.sub(lambda match: makers[match[1]](), draw.one(templates))
        return self._sentence(text)

    def _heading(self, title: str) -> str:
        title = self._sentence(title)
        form = self.rng.random()
        if form < 0.4:
            return f"{title}\n\n" if form < 0.2 else f"{title}\n"
        return f"{'#' * self.rng.randint(1, 3)} {title}\n\n" if form < 0.75 else f"{title}:\n"

    # notes -------------------------------------------------------------------------------------

    def note(self) -> str:
        form = self.rng.random()
        if form < 0.1:
            return self._table()
        if form < 0.17:
            return self._about()
        return self._sections() if form < 0.29 else self._plain()

    def _plain(self) -> str:
        """Sentences or lines about this and that."""
        rng = self.rng
        made: list[Fact] = []
        for _ in range(rng.choice(_FACTS)):
            sibling = made and rng.random() < 0.4
            source = rng.choice(made) if sibling else None
            fact = self._add(
                (lambda source=source: self._sibling(source)) if source is not None
                else (lambda: self._make(rng.choice(FAMILIES)))
            )  # fmt: skip
            made += [fact] if fact is not None else []
        title = self._heading(self._idle(_TITLES)) if rng.random() < 0.3 else ""
        return title + self._body(made)

    def _body(self, facts: list[Fact]) -> str:
        rng = self.rng
        form = rng.random()
        share = 0.0 if form < 0.5 else 1.0 if form < 0.85 else 0.5  # of lines, not sentences
        pieces = [self._line(f) if rng.random() < share else self._state(f) for f in facts]
        if share == 0 and len(pieces) > 1 and rng.random() < 0.3:
            first, second = pieces.pop(), pieces.pop()
            second = second[0].lower() + second[1:] if second.startswith("The ") else second
            pieces.append(f"{first.rstrip('.')} and {second}")
        pieces += [
            self._idle() if rng.random() < 0.8 else self.filler.foreign_sentence()
            for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3)))
        ]
        if rng.random() < 0.7:
            rng.shuffle(pieces)
        listed = share > 0 or rng.random() < 0.3
        if not listed:
            seams = [self.draw.one((" ", " ", " ", "\n", "\n\n")) for _ in pieces]
            text = "".join(piece + seam for piece, seam in zip(pieces, seams, strict=True)).strip()
        else:
            mark = self.draw.one(("- ", "- ", "* ", "", "", "", "1"))
            text = "\n".join(
                (f"{number}. " if mark == "1" else mark) + piece
                for number, piece in enumerate(pieces, 1)
            )
        return text + self.draw.one(("", "\n"))

    def _about(self) -> str:
        """Something is named once, and what follows is said of it."""
        holder = TOPICAL.slots["s"](self.draw)
        pieces: list[str] = []
        for _ in range(self.rng.randint(2, 4)):
            fact = self._add(lambda: self._make(TOPICAL, {"s": holder}))
            if fact is not None:
                templates = _FOLLOWING if pieces else ATTRIBUTE.statements
                pieces.append(self._state(fact, templates))
        return " ".join(pieces)

    def _sections(self) -> str:
        """One heading or more, and what is said under each of what it names."""
        sections = []
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            holder = TOPICAL.slots["s"](self.draw)
            made = [
                fact
                for _ in range(self.rng.randint(1, 4))
                if (fact := self._add(lambda s=holder: self._make(TOPICAL, {"s": s})))
            ]
            name = self.draw.one(holder.get("s0", holder["s"]))
            sections.append(self._heading(name) + self._body(made))
        return "\n\n".join(section.strip() for section in sections)

    def _table(self) -> str:
        """A row for each thing, a column for each relation."""
        rng, draw = self.rng, self.draw
        columns = list({draw.relation(): None for _ in range(rng.randint(1, 3))})
        lines = [["item" if rng.random() < 0.5 else "", *columns]]
        for _ in range(rng.randint(1, 4)):
            holder = ATTRIBUTE.slots["s"](draw)
            row = [self._make(ATTRIBUTE, {"s": holder, "r": {"r": (c,)}}) for c in columns]
            if not any(new.agrees(old, {"s", "r"}) for new in row for old in self.facts):
                self.facts += row
                name = draw.one(holder.get("s0", holder["s"]))
                lines.append([name, *(fact.values["o"][0] for fact in row)])
        lines.insert(1, ["---"] * (len(columns) + 1))
        if rng.random() < 0.3:
            return "\n".join(", ".join(cells) for cells in lines if cells[0] != "---")
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)

    # questions ---------------------------------------------------------------------------------

    def _phrase(self, fact: Fact) -> tuple[str, str, set[str]] | None:
        """A question about the fact, its answer, and the slots that the question names."""
        fields = fact.fields()
        question, answer = self.rng.choice(fact.family.asked)
        if not all(field in fields for field in _FIELD.findall(question + answer)):
            return None
        named = {
            slot
            for slot, forms in fact.slots.items()
            if any(field in forms for field in _FIELD.findall(question))
        }
        question, answer = self.fill(f"{question}\0{answer}", fields).split("\0")
        return self._careless_question(question), answer, named

    def _careless_question(self, question: str) -> str:
        form = self.rng.random()
        if form < 0.06:
            question = question.rstrip("?.").lower()
        elif form < 0.1:
            question = question.rstrip("?.")
        return question[0].upper() + question[1:] if form >= 0.06 else question

    def _unsaid(self, known: Fact | None) -> Fact:
        """What the notes may not say: near to a known fact, or something else of its subject."""
        if known is None or not known.slots:
            return self._make(self.rng.choice(FAMILIES))
        if self.rng.random() < 0.55:
            return self._sibling(known)
        subjects = [forms for slot, forms in known.slots.items() if slot in ("s", "x", "p")]
        if not subjects:
            return self._sibling(known)
        recast = _recast(subjects[0])
        family = self.rng.choice([f for f in FAMILIES if f.slots.keys() & recast.keys()])
        return self._make(family, {s: f for s, f in recast.items() if s in family.slots})

    def question(self, unsaid: bool) -> tuple[str, str, bool] | None:
        """A question that the notes answer once, or not at all; None if this draw gives none."""
        rng = self.rng
        known = rng.choice(self.facts) if self.facts else None
        if unsaid:
            asked = self._unsaid(known if rng.random() < 0.8 else None)
        elif known is None:
            return None
        else:
            asked = known
        phrase = self._phrase(asked)
        if phrase is None:
            return None
        question, answer, named = phrase
        meant = sum(asked.agrees(fact, named) for fact in self.facts)
        if unsaid:
            return (question, NO_ANSWER, False) if not meant else None
        return (question, answer, True) if meant == 1 else None


def compose(rng: random.Random, unsaid: float = 0.3) -> Note:
    """Notes and questions; `unsaid` is the share of questions that the notes do not answer."""
    composer = Composer(rng)
    texts = tuple(composer.note() for _ in range(rng.choice(_NUM_NOTES)))
    asked: dict[str, tuple[str, str, bool]] = {}
    for _ in range(min(14, 2 + 2 * len(composer.facts))):
        drawn = composer.question(rng.random() < unsaid)
        if drawn is not None:
            asked.setdefault(drawn[0], drawn)
    return Note(tuple(text for text in texts if text.strip()), tuple(asked.values()))
