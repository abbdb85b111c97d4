"""The relations of the world, each with its statements, questions and answer.

An answer is a sentence that starts with "The" and repeats the subject before the value. A model
that copies the subject first finds the value more easily. No name starts an answer, because
byte-level BPE would give it other tokens there than in the document."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Relation:
    """One kind of fact. Templates use `{s}`, `{o}` and the slots of the fact."""

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    description: str = ""  # refers to the object without its value: "the sister of {s}"


@dataclass(frozen=True)
class Fact:
    """A relation with its slots filled; `slots["s"]` is the subject, `value` the object."""

    relation: Relation
    slots: dict[str, str] = field(hash=False)
    value: str

    @property
    def key(self) -> tuple[str, ...]:
        """The subject and relation of the fact; facts of one world have distinct keys."""
        return (self.relation.name, *(self.slots[slot] for slot in sorted(self.slots)))

    def state(self, template: str) -> str:
        sentence = template.format(o=self.value, **self.slots)
        return sentence[0].upper() + sentence[1:]

    def question(self, template: str, subject: str | None = None) -> str:
        slots = self.slots if subject is None else {**self.slots, "s": subject}
        return template.format(**slots)

    def answer(self) -> str:
        return self.relation.answer.format(o=self.value, **self.slots)

    def description(self) -> str:
        return self.relation.description.format(**self.slots)


HOME = Relation(
    "home",
    ("{s} lives in {o}.", "The home of {s} is in {o}.", "{s} has a house in {o}.",
     "{o} is the town where {s} lives."),
    ("Where does {s} live?", "In which town does {s} live?", "Where is the home of {s}?"),
    "The home of {s} is in {o}.",
)  # fmt: skip
BIRTHPLACE = Relation(
    "birthplace",
    ("{s} was born in {o}.", "The birthplace of {s} is {o}.", "{s} comes from {o}."),
    ("Where was {s} born?", "What is the birthplace of {s}?", "Where does {s} come from?"),
    "The birthplace of {s} is {o}.",
)
SCHOOL = Relation(
    "school",
    ("{s} went to school in {o}.", "As a child {s} went to school in {o}."),
    ("Where did {s} go to school?", "In which town did {s} go to school?"),
    "The school of {s} was in {o}.",
)
TRADE = Relation(
    "trade",
    ("{s} works as a {o}.", "{s} is a {o}.", "By trade {s} is a {o}.", "The trade of {s} is {o}."),
    ("What is the trade of {s}?", "What does {s} do for a living?", "What does {s} work as?"),
    "The trade of {s} is {o}.",
)
EXTENSION = Relation(
    "extension",
    ("{s} can be reached at extension {o}.", "The extension of {s} is {o}.",
     "To reach {s}, call extension {o}.", "The phone number of {s} is {o}."),
    ("What is the extension of {s}?", "At which extension can {s} be reached?",
     "What is the phone number of {s}?"),
    "The extension of {s} is {o}.",
)  # fmt: skip
DESK = Relation(
    "desk",
    ("{s} sits in room {o}.", "The desk of {s} is in room {o}.", "Room {o} is shared by {s}."),
    ("In which room does {s} sit?", "Where is the desk of {s}?", "Which room does {s} sit in?"),
    "The desk of {s} is in room {o}.",
)
INSTRUMENT = Relation(
    "instrument",
    ("{s} plays the {o}.", "In the evenings {s} plays the {o}.", "{s} has learned the {o}."),
    ("Which instrument does {s} play?", "What does {s} play?"),
    "The instrument of {s} is the {o}.",
)
KIN = Relation(
    "kin",
    ("{o} is the {k} of {s}.", "The {k} of {s} is {o}.", "{s} has a {k} named {o}.",
     "The {k} of {s} is called {o}."),
    ("Who is the {k} of {s}?", "What is the name of the {k} of {s}?"),
    "The {k} of {s} is {o}.",
    "the {k} of {s}",
)  # fmt: skip
DUTY = Relation(
    "duty",
    ("{o} {v} {s}.", "{s} are {p} by {o}.", "It is {o} who {v} {s}.",
     "The person who {v} {s} is {o}.", "All {s} are {p} by {o}.", "Here {o} {v} {s}."),
    ("Who {v} {s}?", "By whom are {s} {p}?", "Which person {v} {s}?"),
    "The person who {v} {s} is {o}.",
    "the person who {v} {s}",
)  # fmt: skip
HEAD = Relation(
    "head",
    ("{o} is the head of {s}.", "The head of {s} is {o}.", "{s} is led by {o}.",
     "{o} runs {s}."),
    ("Who is the head of {s}?", "Who leads {s}?", "Who runs {s}?"),
    "The head of {s} is {o}.",
    "the head of {s}",
)  # fmt: skip
ROOM = Relation(
    "room",
    ("The {s} is in {o}.", "You will find the {s} in {o}.", "The {s} has moved to {o}."),
    ("Where is the {s}?", "Where can I find the {s}?"),
    "The {s} is in {o}.",
)
EVENT = Relation(
    "event",
    ("The {s} is on {o}.", "The {s} takes place on {o}.", "On {o} we hold the {s}.",
     "The {s} will be held on {o}."),
    ("When is the {s}?", "On which day is the {s}?", "When does the {s} take place?"),
    "The {s} is on {o}.",
)  # fmt: skip
ATTRIBUTE = Relation(
    "attribute",
    ("The {n} of {s} is {o}.", "{s} has {o} as its {n}.", "For {s}, the {n} is {o}."),
    ("What is the {n} of {s}?", "Which {n} does {s} have?"),
    "The {n} of {s} is {o}.",
)
PRICE = Relation(
    "price",
    ("The {s} costs {o} crowns.", "The price of the {s} is {o} crowns.",
     "We paid {o} crowns for the {s}."),
    ("How much does the {s} cost?", "What is the price of the {s}?"),
    "The price of the {s} is {o} crowns.",
)  # fmt: skip
COUNT = Relation(
    "count",
    ("There are {o} {n} in {s}.", "{s} has {o} {n}.", "In {s} we counted {o} {n}."),
    ("How many {n} are there in {s}?", "How many {n} does {s} have?"),
    "The number of {n} in {s} is {o}.",
)
MARK = Relation(
    "mark",
    ("The {k} of {s} is {o}.", "{s} has the {k} {o}.", "As its {k}, {s} has {o}."),
    ("What is the {k} of {s}?", "Which {k} does {s} have?"),
    "The {k} of {s} is {o}.",
)

# inherited from an earlier document: the value or a neutral word follows "stays"
INHERITED_MARKS: tuple[str, ...] = (
    "Like that of {r}, the {k} of {s} stays",
    "As in {r}, the {k} of {s} stays",
    "Taken from {r}, the {k} of {s} stays",
)

PERSON_ATTRIBUTES: tuple[Relation, ...] = (
    HOME, BIRTHPLACE, SCHOOL, TRADE, EXTENSION, DESK, INSTRUMENT, KIN,
)  # fmt: skip
