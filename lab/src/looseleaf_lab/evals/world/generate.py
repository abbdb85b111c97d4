"""Writes a world: documents of English-like sentences, and the facts that they hold.

Seeds below `TRAINING_SEEDS_START` belong to evaluation, those from it on to training; made-up names
are split the same way (`names.py`), so an evaluated world shares no such name with training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from looseleaf_lab.evals.world import words
from looseleaf_lab.evals.world.draw import FactDrawer
from looseleaf_lab.evals.world.filler import Filler
from looseleaf_lab.evals.world.look_alikes import look_alike
from looseleaf_lab.evals.world.relations import INHERITED_MARKS, MARK, Fact

TRAINING_SEEDS_START = 1 << 40
MAX_HOPS = 3


@dataclass(frozen=True)
class WorldConfig:
    """How large a world is and how its text reads."""

    num_documents: int = 6
    facts: tuple[int, int] = (3, 6)  # per document, besides marks
    fillers: tuple[int, int] = (0, 3)
    marks: tuple[int, int] = (1, 2)  # mark facts per document
    hops: int | None = None  # a chain at least this long is sure to be there
    shown: float = 0.0  # share of inherited marks that are named openly
    foreign: float = 0.0  # share of documents that are foreign prose
    max_hops: int = MAX_HOPS  # of any chain
    look_alikes: float = 0.0  # facts that nearly match another, per fact


@dataclass(frozen=True)
class Placed:
    """A fact and the document that states it. `hops`: documents a mark was handed on through."""

    fact: Fact
    document: int
    hops: int = 0


@dataclass(frozen=True)
class WorldDocument:
    """A text, and where in it something inherited stands: character offset, and what it means."""

    text: str
    inherited: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class World:
    """Documents in order and what they say."""

    documents: tuple[WorldDocument, ...]
    facts: tuple[Placed, ...]
    bridges: tuple[tuple[Placed, Placed], ...]
    marks: tuple[Placed, ...]
    look_alikes: tuple[tuple[Placed, Placed], ...]
    drawer: FactDrawer = field(repr=False)
    filler: Filler = field(repr=False)


@dataclass(frozen=True)
class _Sentence:
    text: str
    inherited: tuple[int, str] | None = None


def is_training_seed(seed: int) -> bool:
    return seed >= TRAINING_SEEDS_START


def make_world(seed: int, config: WorldConfig | None = None) -> World:
    """The world of this seed."""
    return _WorldWriter(seed, config or WorldConfig()).write()


class _WorldWriter:
    def __init__(self, seed: int, config: WorldConfig) -> None:
        self.config = config
        self.rng = random.Random(seed)
        held_out = not is_training_seed(seed)
        self.drawer = FactDrawer(self.rng, held_out)
        self.filler = Filler(self.rng, self.drawer.name)
        self.sentences: list[list[_Sentence]] = [[] for _ in range(config.num_documents)]
        self.facts: list[Placed] = []
        self.bridges: list[tuple[Placed, Placed]] = []
        self.marks: list[Placed] = []
        self.look_alikes: list[tuple[Placed, Placed]] = []
        self.mark_kind = ""

    def write(self) -> World:
        wanted = [self.rng.randint(*self.config.facts) for _ in self.sentences]
        if self.config.marks[1] > 0:
            self._write_marks()
        self._write_facts(wanted)
        self._write_look_alikes()
        documents = tuple(self._document(sentences) for sentences in self.sentences)
        return World(
            documents, tuple(self.facts), tuple(self.bridges), tuple(self.marks),
            tuple(self.look_alikes), self.drawer, self.filler,
        )  # fmt: skip

    # facts -------------------------------------------------------------------------------------

    def _place(self, fact: Fact, document: int) -> Placed:
        placed = Placed(fact, document)
        template = self.rng.choice(fact.relation.statements)
        self.sentences[document].append(_Sentence(fact.state(template)))
        self.facts.append(placed)
        return placed

    def _write_facts(self, wanted: list[int]) -> None:
        """Fill every document: pairs that make a bridge, and facts that stand alone."""
        rng = self.rng
        room = [document for document, count in enumerate(wanted) for _ in range(count)]
        rng.shuffle(room)
        while room:
            here = room.pop()
            form = rng.random()
            elsewhere = next((d for d in reversed(room) if d != here), None)
            if elsewhere is not None and form < 0.45:
                room.remove(elsewhere)
                first = self._place(self.drawer.naming_person(), here)
                second = self._place(self.drawer.about_person(first.fact.value), elsewhere)
                self.bridges.append((first, second))
            elif form < 0.65:
                self._place(self.drawer.about_person(self.drawer.some_person()), here)
            else:
                self._place(self.drawer.other(), here)

    def _write_look_alikes(self) -> None:
        """To some facts another that nearly matches, in any document; nothing is drawn for none."""
        if not self.config.look_alikes:
            return
        for placed in tuple(self.facts):
            if self.rng.random() < self.config.look_alikes:
                fact = look_alike(self.drawer, placed.fact)
                if fact is not None:
                    document = self.rng.randrange(self.config.num_documents)
                    self.look_alikes.append((placed, self._place(fact, document)))

    # marks -------------------------------------------------------------------------------------

    def _write_marks(self) -> None:
        """Marks named openly or handed on from a mark of an earlier document, at most max_hops."""
        rng = self.rng
        values = rng.sample(words.MARKS, len(words.MARKS))
        # one kind to a world, or the kind asked for would tell which mark is meant
        self.mark_kind = rng.choice(words.MARK_KINDS)
        forced = self._forced_path()
        last_on_path: Placed | None = None
        for document in range(self.config.num_documents):
            if document in forced:
                last_on_path = self._mark(document, last_on_path, values, hidden=True)
            for _ in range(rng.randint(*self.config.marks) - (document in forced)):
                earlier = [
                    m for m in self.marks if m.document < document and m.hops < self.config.max_hops
                ]
                referred = rng.choice(earlier) if earlier and rng.random() < 0.4 else None
                hidden = rng.random() >= self.config.shown
                self._mark(document, referred, values, hidden)

    def _forced_path(self) -> tuple[int, ...]:
        longest = min(self.config.max_hops, self.config.num_documents - 1)
        hops = self.rng.randint(0, longest) if self.config.hops is None else self.config.hops
        if hops > longest:
            raise ValueError(
                f"a chain of {hops} hops needs {hops + 1} documents, "
                f"at most {self.config.max_hops} hops"
            )
        return tuple(sorted(self.rng.sample(range(self.config.num_documents), hops + 1)))

    def _mark(
        self, document: int, referred: Placed | None, values: list[str], hidden: bool
    ) -> Placed:
        rng = self.rng
        if referred is None and not values:  # every mark of the language stands for something
            referred = rng.choice([mark for mark in self.marks if mark.document < document])
        value = referred.fact.value if referred else values.pop()
        fact = Fact(MARK, {"s": self.drawer.marked_site(), "k": self.mark_kind}, value)
        while not self.drawer.claim(fact):
            fact = Fact(MARK, {"s": self.drawer.marked_site(), "k": self.mark_kind}, value)
        if referred is None:
            sentence = _Sentence(fact.state(rng.choice(MARK.statements)))
            placed = Placed(fact, document)
        else:
            start = rng.choice(INHERITED_MARKS).format(**fact.slots, r=referred.fact.slots["s"])
            shown = words.NEUTRAL if hidden else value
            sentence = _Sentence(f"{start} {shown}.", (len(start), value))
            placed = Placed(fact, document, referred.hops + 1 if hidden else 0)
        self.sentences[document].append(sentence)
        self.marks.append(placed)
        return placed

    # documents ---------------------------------------------------------------------------------

    def _document(self, sentences: list[_Sentence]) -> WorldDocument:
        rng = self.rng
        if rng.random() < self.config.foreign:
            sentences += [_Sentence(self.filler.foreign_text(rng.randint(1, 4))) for _ in range(2)]
        else:
            fillers = rng.randint(*self.config.fillers)
            sentences += [_Sentence(self.filler.idle()) for _ in range(fillers)]
        rng.shuffle(sentences)
        text = self.filler.title() if rng.random() < 0.6 else ""
        listed = rng.random() < 0.08
        inherited = []
        for sentence in sentences:
            if text:
                text += self._seam(text, listed)
            elif listed:
                text = "- "
            if sentence.inherited is not None:
                offset, value = sentence.inherited
                inherited.append((len(text) + offset, value))
            text += sentence.text
        return WorldDocument(text, tuple(inherited))

    def _seam(self, text: str, listed: bool) -> str:
        """What stands between two sentences."""
        if listed:
            return "\n- "
        chance = self.rng.random()
        if chance < 0.08 or text[-1] not in ".?!:":
            return "\n\n"
        return "\n" if chance < 0.16 else " "
