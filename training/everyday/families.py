"""Kinds of facts in everyday notes: how each is stated, listed, asked for and answered. Data only.

A template's fields are forms of the fact's slots (what it is about) and values (what it says).
Answers begin with "The", restate what was asked and end with the value, as those of the world do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.everyday import words
from training.everyday.draw import Draw
from training.everyday.makers import Maker, creature, holder, just, place, target, verb


@dataclass(frozen=True)
class Family:
    """Facts of one kind. Families of one `group` use the same slots and never contradict."""

    group: str
    slots: dict[str, Maker]
    values: Maker
    statements: tuple[str, ...]
    lines: tuple[str, ...]
    asked: tuple[tuple[str, str], ...]


_ATTRIBUTE_ASKED = (
    ("What is the {r} of {s}?", "The {r} of {s} is {o}."),
    ("What is the {r} of {s}?", "The {r} of {s} is {o}."),
    ("What's the {r} of {s}?", "The {r} of {s} is {o}."),
    ("What is {s}'s {r}?", "The {r} of {s} is {o}."),
    ("What is the {r} for {s}?", "The {r} for {s} is {o}."),
    ("Which {r} does {s} have?", "The {r} of {s} is {o}."),
    ("What {r} does {s} have?", "The {r} of {s} is {o}."),
    ("What is the {s0} {r}?", "The {s0} {r} is {o}."),
    ("Tell me the {r} of {s}.", "The {r} of {s} is {o}."),
    ("I need the {r} of {s}.", "The {r} of {s} is {o}."),
    ("{r} of {s}?", "The {r} of {s} is {o}."),
    ("Can you tell me the {r} of {s}?", "The {r} of {s} is {o}."),
)
ATTRIBUTE = Family(
    "attribute",
    {"r": just("r", Draw.relation), "s": holder},
    just("o", Draw.value),
    ("the {r} of {s} is {o}.", "the {r} of {s} is {o}.", "the {r} for {s} is {o}.",
     "{s}'s {r} is {o}.", "{o} is the {r} of {s}.", "for {s} the {r} is {o}.",
     "{s} has the {r} {o}.", "the {s0} {r} is {o}.", "use {o} as the {r} for {s}.",
     "the {r} of {s} has changed to {o}.", "the {r} of {s}: {o}."),
    ("{r} of {s}: {o}", "{s}, {r}: {o}", "{s0} {r}: {o}", "{s}: {r} {o}", "{r} ({s0}): {o}",
     "{s} - {r}: {o}", "{r} for {s}: {o}", "{s}'s {r}: {o}"),
    _ATTRIBUTE_ASKED,
)  # fmt: skip
PLAIN = Family(
    "attribute",
    {"r": just("r", Draw.relation)},
    just("o", Draw.value),
    ("the {r} is {o}.", "the {r} is {o}.", "our {r} is {o}.", "the {r} is now {o}.",
     "{o} is the {r}.", "{r} is {o}.", "remember that the {r} is {o}.", "my {r} is {o}.",
     "the {r} has been changed to {o}.", "use {o} as the {r}.", "its {r} is {o}."),
    ("{r}: {o}", "{r}: {o}", "{r}: {o}", "{r} = {o}", "{r} - {o}", "{r} {o}", "{r} is {o}"),
    (("What is the {r}?", "The {r} is {o}."), ("What is the {r}?", "The {r} is {o}."),
     ("What's the {r}?", "The {r} is {o}."), ("Which {r} do we have?", "The {r} is {o}."),
     ("Tell me the {r}.", "The {r} is {o}."), ("{r}?", "The {r} is {o}."),
     ("What is our {r}?", "The {r} is {o}."), ("What is my {r}?", "The {r} is {o}."),
     ("What {r} should I use?", "The {r} is {o}."), ("I need the {r}.", "The {r} is {o}.")),
)  # fmt: skip
# what stands under a heading is about the heading
TOPICAL = replace(
    PLAIN, slots=ATTRIBUTE.slots, asked=PLAIN.asked[:4] + PLAIN.asked[:2] + _ATTRIBUTE_ASKED
)
ROLE = Family(
    "role",
    {"r": just("r", Draw.role)},
    just("o", Draw.somebody),
    ("the {r} is {o}.", "{o} is the {r}.", "our {r} is {o}.", "the {r} is called {o}.",
     "{o} is our {r}.", "the new {r} is {o}.", "{o} will be the {r}.", "as {r} we have {o}."),
    ("{r}: {o}", "{r}: {o}", "{o}, {r}", "{o} ({r})", "new {r}: {o}", "{r} - {o}"),
    (("Who is the {r}?", "The {r} is {o}."), ("Who is the {r}?", "The {r} is {o}."),
     ("Who is our {r}?", "The {r} is {o}."), ("Who's the {r}?", "The {r} is {o}."),
     ("What is the name of the {r}?", "The name of the {r} is {o}."),
     ("What is the {r} called?", "The name of the {r} is {o}."),
     ("Who will be the {r}?", "The {r} is {o}.")),
)  # fmt: skip
ROLE_OF = Family(
    "role",
    {"r": just("r", Draw.role), "s": place},
    just("o", Draw.somebody),
    ("the {r} of {s} is {o}.", "{o} is the {r} of {s}.", "{s} has a new {r}: {o}.",
     "{o} works as the {r} of {s}.", "the {s0} {r} is {o}."),
    ("{r} of {s}: {o}", "{s}: {r} {o}", "{r} ({s0}): {o}", "{s0} {r}: {o}"),
    (("Who is the {r} of {s}?", "The {r} of {s} is {o}."),
     ("What is the name of the {r} of {s}?", "The name of the {r} of {s} is {o}."),
     ("Who works as the {r} of {s}?", "The {r} of {s} is {o}."),
     ("Who is the {s0} {r}?", "The {s0} {r} is {o}.")),
)  # fmt: skip
NAMED = Family(
    "named",
    {"x": creature},
    just("o", lambda draw: draw.invented().capitalize() if draw.rng.random() < 0.5
          else draw.one((draw.name(), draw.noun().capitalize(), draw.phrase()))),
    ("{x} is called {o}.", "our {x0} is called {o}.", "the name of {x} is {o}.",
     "{x} is named {o}.", "my {x0} is named {o}.", "we named {x} {o}.", "we call {x} {o}."),
    ("name of {x}: {o}", "{x0}: {o}", "{x0} name: {o}"),
    (("What is {x} called?", "The name of {x} is {o}."),
     ("What is the name of {x}?", "The name of {x} is {o}."),
     ("What's the name of {x}?", "The name of {x} is {o}."),
     ("How is {x} called?", "The name of {x} is {o}.")),
)  # fmt: skip
DUTY = Family(
    "duty",
    {"v": verb, "x": target},
    just("o", Draw.somebody),
    ("{o} {v3} {x}.", "{o} {v3} {x}.", "{x} {be} {vn} by {o}.", "it is {o} who {v3} {x}.",
     "{o} will {v} {x}.", "{o} has to {v} {x}.", "{o} is going to {v} {x}.",
     "please ask {o} to {v} {x}.", "{x} must be {vn} by {o}.", "here {o} {v3} {x}."),
    ("{o} {v3} {x}", "{o}: {v} {x}", "{x}: {vn} by {o}", "{v} {x}: {o}", "{v} {x} ({o})",
     "{x} {be} {vn} by {o}", "{o} will {v} {x}"),
    (("Who {v3} {x}?", "The person who {v3} {x} is {o}."),
     ("Who {v3} {x}?", "The person who {v3} {x} is {o}."),
     ("Who will {v} {x}?", "The person who {v3} {x} is {o}."),
     ("Who has to {v} {x}?", "The person who {v3} {x} is {o}."),
     ("Who should {v} {x}?", "The person who {v3} {x} is {o}."),
     ("By whom {be} {x} {vn}?", "The person who {v3} {x} is {o}."),
     ("Which person {v3} {x}?", "The person who {v3} {x} is {o}.")),
)  # fmt: skip
DEED = Family(
    "duty",
    {"v": verb, "x": target},
    just("o", Draw.somebody),
    ("{o} {vd} {x}.", "{o} {vd} {x}.", "{o} has {vn} {x}.", "it was {o} who {vd} {x}.",
     "{x} {has} been {vn} by {o}.", "{x} {was} {vn} by {o}.", "last week {o} {vd} {x}.",
     "{x} {was} {vn} by {o} in 1990.", "{x} {was} {vn} by {o} last May."),
    ("{o} {vd} {x}", "{x}: {vn} by {o}", "{x} {vn} by {o}"),
    (("Who {vd} {x}?", "The person who {vd} {x} is {o}."),
     ("Who has {vn} {x}?", "The person who {vd} {x} is {o}."),
     ("By whom {was} {x} {vn}?", "The person who {vd} {x} is {o}.")),
)  # fmt: skip
CHARGE = Family(
    "charge",
    {"x": target},
    just("o", Draw.somebody),
    ("{o} is responsible for {x}.", "{o} is in charge of {x}.", "{o} looks after {x}.",
     "{o} takes care of {x}.", "{x} {be} up to {o}.", "ask {o} about {x}.",
     "the person responsible for {x} is {o}."),
    ("{x0}: {o}", "{x0}: {o}", "{x0} - {o}", "responsible for {x}: {o}"),
    (("Who is responsible for {x}?", "The person responsible for {x} is {o}."),
     ("Who is in charge of {x}?", "The person in charge of {x} is {o}."),
     ("Who looks after {x}?", "The person responsible for {x} is {o}."),
     ("Who takes care of {x}?", "The person responsible for {x} is {o}."),
     ("Who should I ask about {x}?", "The person responsible for {x} is {o}.")),
)  # fmt: skip
LIKING = Family(
    "liking",
    {"p": just("p", Draw.person), "v": verb},
    just("o", lambda draw: draw.one((draw.phrase(), f"the {draw.thing()}", draw.plural(),
                                      f"{draw.plural()} and {draw.thing()}",
                                      f"{draw.one(words.MASS)} and {draw.plural()}",
                                      draw.one(words.MASS),
                                      f"a {draw.one(words.COLOURS)} {draw.noun()}"))),
    ("{p} {v3} {o}.", "{p} {v3} {o}.", "{p} always {v3} {o}.", "{p} likes to {v} {o}.",
     "this is {p}. She {v3} {o}.", "{p} was there. He {v3} {o}."),
    ("{p} {v3} {o}", "{p}: {v3} {o}"),
    (("What does {p} {v}?", "The thing that {p} {v3} is {o}."),
     ("What does {p} {v}?", "The thing that {p} {v3} is {o}."),
     ("What {v3} {p}?", "The thing that {p} {v3} is {o}.")),
)  # fmt: skip
HAPPENED = replace(
    LIKING,
    group="happened",
    statements=("{p} {vd} {o}.", "{p} has {vn} {o}.", "yesterday {p} {vd} {o}.", "{p} {vd} {o}."),
    lines=("{p} {vd} {o}",),
    asked=(("What did {p} {v}?", "The thing that {p} {vd} is {o}."),
           ("What has {p} {vn}?", "The thing that {p} {vd} is {o}.")),
)  # fmt: skip
PHONE = Family(
    "phone",
    {"p": lambda draw: {"p": (draw.one((draw.person(), f"the {draw.role()}",
                                        f"the {draw.place()}")),)}},
    lambda draw: {"o": (draw.phone(),), "q": (draw.person(),)},
    ("call {p} at {o}.", "{p} can be reached at {o}.", "the number of {p} is {o}.",
     "{p}'s phone number is {o}.", "the phone number of {p} is {o}.", "call {o} for {p}.",
     "in an emergency call {p}: {o}.", "{p} has the number {o}."),
    ("{p}: {o}", "{p}: {o}", "{p} {o}", "{p}, tel. {o}", "phone {p}: {o}", "{p} ({o})",
     "{p} ({q}): {o}", "{p}, {q}: {o}"),
    (("What is the number of {p}?", "The number of {p} is {o}."),
     ("What is the phone number of {p}?", "The phone number of {p} is {o}."),
     ("What's {p}'s phone number?", "The phone number of {p} is {o}."),
     ("What is {p}'s number?", "The number of {p} is {o}."),
     ("How can I reach {p}?", "The phone number of {p} is {o}."),
     ("Which number do I call for {p}?", "The phone number of {p} is {o}.")),
)  # fmt: skip
PEOPLE_FAMILIES = (ROLE, ROLE_OF, NAMED, DUTY, DUTY, DEED, CHARGE, LIKING, HAPPENED, PHONE)
