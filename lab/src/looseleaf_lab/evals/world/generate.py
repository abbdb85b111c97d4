"""Writes a world: documents of English-like sentences, and the facts that they state.

Seeds below `TRAINING_SEEDS_START` are for evaluation, all others for training. Made-up names have
the same split (`names.py`), so an evaluation world shares no such name with training.
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
    """Sizes of a world and shares of its kinds of text."""

    num_documents: int = 6
    facts: tuple[int, int] = (3, 6)  # per document, without marks
    fillers: tuple[int, int] = (0, 3)
    marks: tuple[int, int] = (1, 2)  # mark facts per document
    hops: int | None = None  # guarantees a chain of at least this length
    shown: float = 0.0  # share of inherited marks with an explicit value
    foreign: float = 0.0  # share of documents that are foreign prose
    max_hops: int = MAX_HOPS  # of any chain
    look_alikes: float = 0.0  # nearly matching facts per fact


@dataclass(frozen=True)
class PlacedFact:
    """A fact and the document that states it; ``hops`` counts the documents that pass a mark on."""

    fact: Fact
    document: int
    hops: int = 0


@dataclass(frozen=True)
class WorldDocument:
    """A text, with the character offset and the meaning of each inherited value."""

    text: str
    inherited: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class World:
    """Documents in order, and their facts."""

    documents: tuple[WorldDocument, ...]
    facts: tuple[PlacedFact, ...]
    bridges: tuple[tuple[PlacedFact, PlacedFact], ...]
    marks: tuple[PlacedFact, ...]
    look_alikes: tuple[tuple[PlacedFact, PlacedFact], ...]
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
        self.facts: list[PlacedFact] = []
        self.bridges: list[tuple[PlacedFact, PlacedFact]] = []
        self.marks: list[PlacedFact] = []
        self.look_alikes: list[tuple[PlacedFact, PlacedFact]] = []
        self.mark_kind = ""

    def write(self) -> World:
        fact_counts = [self.rng.randint(*self.config.facts) for _ in self.sentences]
        if self.config.marks[1] > 0:
            self._write_marks()
        self._write_facts(fact_counts)
        self._write_look_alikes()
        documents = tuple(self._document(sentences) for sentences in self.sentences)
        return World(
            documents, tuple(self.facts), tuple(self.bridges), tuple(self.marks),
            tuple(self.look_alikes), self.drawer, self.filler,
        )  # fmt: skip

    # facts -------------------------------------------------------------------------------------

    def _add_fact(self, fact: Fact, document: int) -> PlacedFact:
        placed_fact = PlacedFact(fact, document)
        template = self.rng.choice(fact.relation.statements)
        self.sentences[document].append(_Sentence(fact.state(template)))
        self.facts.append(placed_fact)
        return placed_fact

    def _write_facts(self, fact_counts: list[int]) -> None:
        """Fill every document with pairs of facts that form a bridge, and with single facts."""
        rng = self.rng
        slots = [document for document, count in enumerate(fact_counts) for _ in range(count)]
        rng.shuffle(slots)
        while slots:
            document = slots.pop()
            kind = rng.random()
            second_document = next((d for d in reversed(slots) if d != document), None)
            if second_document is not None and kind < 0.45:
                slots.remove(second_document)
                first = self._add_fact(self.drawer.naming_person(), document)
                second = self._add_fact(self.drawer.about_person(first.fact.value), second_document)
                self.bridges.append((first, second))
            elif kind < 0.65:
                self._add_fact(
                    self.drawer.about_person(self.drawer.known_or_new_person()), document
                )
            else:
                self._add_fact(self.drawer.about_thing(), document)

    def _write_look_alikes(self) -> None:
        """Add nearly matching facts in any document; without look-alikes, draw no random number."""
        if not self.config.look_alikes:
            return
        for placed_fact in tuple(self.facts):
            if self.rng.random() < self.config.look_alikes:
                fact = look_alike(self.drawer, placed_fact.fact)
                if fact is not None:
                    document = self.rng.randrange(self.config.num_documents)
                    self.look_alikes.append((placed_fact, self._add_fact(fact, document)))

    # marks -------------------------------------------------------------------------------------

    def _write_marks(self) -> None:
        """Add marks with explicit values, or inherited from an earlier document over at most
        ``max_hops``."""
        rng = self.rng
        values = rng.sample(words.MARKS, len(words.MARKS))
        # one kind per world, because the kind in a question would identify the mark
        self.mark_kind = rng.choice(words.MARK_KINDS)
        forced = self._forced_path()
        last_on_path: PlacedFact | None = None
        for document in range(self.config.num_documents):
            if document in forced:
                last_on_path = self._mark(document, last_on_path, values, hidden=True)
            for _ in range(rng.randint(*self.config.marks) - (document in forced)):
                earlier = [
                    m for m in self.marks if m.document < document and m.hops < self.config.max_hops
                ]
                source = rng.choice(earlier) if earlier and rng.random() < 0.4 else None
                hidden = rng.random() >= self.config.shown
                self._mark(document, source, values, hidden)

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
        self, document: int, source: PlacedFact | None, values: list[str], hidden: bool
    ) -> PlacedFact:
        rng = self.rng
        if source is None and not values:  # every mark value of the language is used
            source = rng.choice([mark for mark in self.marks if mark.document < document])
        value = source.fact.value if source else values.pop()
        fact = Fact(MARK, {"s": self.drawer.marked_site(), "k": self.mark_kind}, value)
        while not self.drawer.claim(fact):
            fact = Fact(MARK, {"s": self.drawer.marked_site(), "k": self.mark_kind}, value)
        if source is None:
            sentence = _Sentence(fact.state(rng.choice(MARK.statements)))
            placed_fact = PlacedFact(fact, document)
        else:
            start = rng.choice(INHERITED_MARKS).format(**fact.slots, r=source.fact.slots["s"])
            shown_value = words.NEUTRAL if hidden else value
            sentence = _Sentence(f"{start} {shown_value}.", (len(start), value))
            placed_fact = PlacedFact(fact, document, source.hops + 1 if hidden else 0)
        self.sentences[document].append(sentence)
        self.marks.append(placed_fact)
        return placed_fact

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
        is_list = rng.random() < 0.08
        inherited = []
        for sentence in sentences:
            if text:
                text += self._seam(text, is_list)
            elif is_list:
                text = "- "
            if sentence.inherited is not None:
                offset, value = sentence.inherited
                inherited.append((len(text) + offset, value))
            text += sentence.text
        return WorldDocument(text, tuple(inherited))

    def _seam(self, text: str, is_list: bool) -> str:
        """The separator of two sentences."""
        if is_list:
            return "\n- "
        chance = self.rng.random()
        if chance < 0.08 or text[-1] not in ".?!:":
            return "\n\n"
        return "\n" if chance < 0.16 else " "
