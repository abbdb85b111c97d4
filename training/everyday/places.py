"""Kinds of facts about times, places and quantities. Data only; see `families.py`."""

from __future__ import annotations

from training.everyday import words
from training.everyday.draw import Draw
from training.everyday.families import ATTRIBUTE, PEOPLE_FAMILIES, PLAIN, Family
from training.everyday.makers import (
    Forms,
    clock,
    hours,
    just,
    opener,
    place,
    target,
    task,
    thing,
    verb,
    when,
    where,
)  # fmt: skip


def _owner(draw: Draw) -> Forms:
    return {"p": (draw.somebody(),)}


def _vehicle(draw: Draw) -> Forms:
    return {"k": (draw.one(words.VEHICLES),)}


def _destination(draw: Draw) -> Forms:
    return {"d": (draw.one((f"the {draw.place()}", draw.town())),)}


def _event_values(draw: Draw) -> Forms:
    return {**when(draw), "l": (draw.where(),)}


EVENT = Family(
    "event",
    {"e": just("e", Draw.event)},
    when,
    ("the {e} is {o}.", "the {e} is {o}.", "the {e} takes place {o}.", "our {e} is {o}.",
     "the {e} has been moved to {o0}.", "{o} we have the {e}.", "the next {e} is {o}.",
     "the {e} will be {o}.", "the {e} starts {o}."),
    ("{e}: {o0}", "{e}: {o0}", "{e} {o}", "{e} - {o0}", "{e} moved to {o0}", "{o0}: {e}"),
    (("When is the {e}?", "The {e} is {o}."), ("When is the {e}?", "The {e} is {o}."),
     ("When does the {e} take place?", "The {e} is {o}."),
     ("When will the {e} be?", "The {e} is {o}."), ("When's the {e}?", "The {e} is {o}.")),
)  # fmt: skip
GATHERING = Family(
    "event",
    {"e": just("e", Draw.event)},
    _event_values,
    ("the {e} is {o} {l}.", "the {e} is {l} {o}.", "the {e} takes place {o} {l}.",
     "we meet {o} {l} for the {e}.", "come to the {e} {o} {l}."),
    ("{e}: {o0}, {l}", "{e} {o} {l}", "{e} ({o0}, {l})"),
    (("When is the {e}?", "The {e} is {o}."), ("Where is the {e}?", "The {e} is {l}."),
     ("Where does the {e} take place?", "The {e} is {l}.")),
)  # fmt: skip
PERSONAL = Family(
    "personal",
    {"p": _owner, "e": just("e", lambda draw: draw.one(words.EVENTS))},
    when,
    ("{p}'s {e} is {o}.", "{p}'s {e} is {o}.", "the {e} of {p} is {o}.",
     "{p} has the {e} {o}.", "we celebrate {p}'s {e} {o}."),
    ("{p}'s {e}: {o0}", "{e} of {p}: {o0}", "{p}, {e}: {o0}", "{e} {p} {o}"),
    (("When is {p}'s {e}?", "The {e} of {p} is {o}."),
     ("When is the {e} of {p}?", "The {e} of {p} is {o}."),
     ("When does {p} have the {e}?", "The {e} of {p} is {o}.")),
)  # fmt: skip
OPENING = Family(
    "opening",
    {"s": opener},
    clock,
    ("{s} {v3} {o}.", "{s} {v3} {o}.", "{s} {v3} {o} every day.", "{o} {s} {v3}.",
     "{s} always {v3} {o}."),
    ("{s} {v3} {o}", "{s0} {v3}: {o0}", "{s0}: {v3} {o}"),
    (("When does {s} {v}?", "The {s0} {v3} {o}."),
     ("What time does {s} {v}?", "The {s0} {v3} {o}."),
     ("At what time does {s} {v}?", "The {s0} {v3} {o}.")),
)  # fmt: skip
HOURS = Family(
    "opening",
    {"s": place},
    hours,
    ("{s} opens at {o} and closes at {u}.", "{s} is open from {o} to {u}.",
     "{s} opens at {o}. It closes at {u}.", "you can visit {s} from {o} to {u}.",
     "{s} opens at {o} and closes at {u}. On Sundays it closes at 11:00.",
     "{s} is open from {o} to {u}, on Mondays from 10 to 14."),
    ("{s0}: {o} to {u}", "{s0}: {o} - {u}", "{s0} open {o}-{u}", "{s0} opens {o}, closes {u}"),
    (("When does {s} open?", "The {s0} opens at {o}."),
     ("When does {s} close?", "The {s0} closes at {u}."),
     ("What time does {s} open?", "The {s0} opens at {o}."),
     ("Until when is {s} open?", "The {s0} closes at {u}."),
     ("What are the opening hours of {s}?", "The {s0} is open from {o} to {u}."),
     ("When is {s} open?", "The {s0} is open from {o} to {u}.")),
)  # fmt: skip
STATE = Family(
    "opening",
    {"s": place, "a": just("a", lambda d: d.one(("closed", "open", "free", "busy", "full",
                                                   "empty", "available", "locked")))},
    just("o", lambda draw: f"on {draw.date()}"),
    ("{s} is {a} {o}.", "{o} {s} is {a}.", "please note that {s} is {a} {o}."),
    ("{s0}: {a} {o}", "{s0} {a} {o}"),
    (("When is {s} {a}?", "The {s0} is {a} {o}."), ("On which day is {s} {a}?",
                                                   "The {s0} is {a} {o}.")),
)  # fmt: skip
SCHEDULE = Family(
    "schedule",
    {"v": verb, "x": target},
    when,
    ("{x} {be} {vn} {o}.", "{x} {be} {vn} {o}.", "we {v} {x} {o}.", "{o} {x} {be} {vn}."),
    ("{x} {be} {vn} {o}", "{x0}: {vn} {o}", "{v} {x}: {o0}"),
    (("When {be} {x} {vn}?", "The {x0} {be} {vn} {o}."),
     ("When do we {v} {x}?", "The {x0} {be} {vn} {o}."),
     ("On which day {be} {x} {vn}?", "The {x0} {be} {vn} {o}.")),
)  # fmt: skip
WHERE = Family(
    "where",
    {"x": target},
    where,
    ("{x} {be} {o}.", "{x} {be} {o}.", "you will find {x} {o}.", "{x} {be} kept {o}.",
     "we keep {x} {o}.", "please put {x} {o}.", "{x} {be} now {o}.", "I left {x} {o}."),
    ("{x0}: {o}", "{x0} {o}", "{x}: {o0}", "{x0} - {o}"),
    (("Where {be} {x}?", "The {x0} {be} {o}."), ("Where {be} {x}?", "The {x0} {be} {o}."),
     ("Where can I find {x}?", "The {x0} {be} {o}."),
     ("Where {be} {x} kept?", "The {x0} {be} {o}."),
     ("Where do we keep {x}?", "The {x0} {be} {o}.")),
)  # fmt: skip
ABODE = Family(
    "abode",
    {"p": _owner, "v": just("v", lambda draw: draw.one(("live", "work", "park", "sleep", "meet",
                                                         "stay", "study", "wait")))},
    where,
    ("{p} {v}s {o}.", "{p} {v}s {o}.", "{p} usually {v}s {o}."),
    ("{p}: {v}s {o}", "{p} {v}s {o}"),
    (("Where does {p} {v}?", "The place where {p} {v}s is {o}."),),
)  # fmt: skip
BASED = Family(
    "where",
    {"x": lambda draw: {"x": (f"the {n}",), "x0": (n,)} if (n := draw.place()) else {}},
    where,
    ("{x} is {o}.", "{x} is {o}.", "{x} has moved. It is now {o}.", "{x} can be found {o}."),
    ("{x0}: {o}", "{x0}: {o0}", "{x0} ({o})"),
    (("Where is {x}?", "The {x0} is {o}."), ("Where can I find {x}?", "The {x0} is {o}.")),
)  # fmt: skip
PRICE = Family(
    "price",
    {"x": thing},
    just("o", lambda draw: draw.amount(words.MONEY)),
    ("{x} costs {o}.", "a {x0} costs {o}.", "the price of {x} is {o}.", "{x} is {o}.",
     "we paid {o} for {x}.", "one {x0} costs {o}.", "you can have {x} for {o}."),
    ("{x0}: {o}", "{x0}: {o}", "{x0} {o}", "{x0} - {o}"),
    (("How much is {x}?", "The price of {x} is {o}."),
     ("How much does {x} cost?", "The price of {x} is {o}."),
     ("How much does a {x0} cost?", "The price of a {x0} is {o}."),
     ("What is the price of {x}?", "The price of {x} is {o}."),
     ("What does {x} cost?", "The price of {x} is {o}.")),
)  # fmt: skip
FARE = Family(
    "fare",
    {"n": just("n", lambda draw: draw.one(words.COUNTED))},
    just("o", lambda draw: draw.amount(words.MONEY)),
    ("{n} pay {o}.", "the price for {n} is {o}.", "for {n} it costs {o}.", "{n} get in for {o}."),
    ("{n}: {o}", "{n} {o}", "{n} pay {o}"),
    (("How much do {n} pay?", "The price for {n} is {o}."),
     ("What do {n} pay?", "The price for {n} is {o}."),
     ("What is the price for {n}?", "The price for {n} is {o}.")),
)  # fmt: skip
NEEDED = Family(
    "needed",
    {"x": just("x", lambda draw: draw.one((draw.one(words.MASS), draw.one(words.COUNTED))))},
    just("o", lambda draw: draw.amount() if draw.rng.random() < 0.7 else draw.count()),
    ("you need {o} of {x}.", "add {o} {x}.", "take {o} of {x}.", "stir in {o} {x}.",
     "it takes {o} of {x}.", "we need {o} {x}."),
    ("{o} {x}", "{o} {x}", "{o} of {x}", "{x}: {o}", "{x} - {o}"),
    (("How much {x} do I need?", "The amount of {x} is {o}."),
     ("How many {x} do I need?", "The amount of {x} is {o}."),
     ("How much {x} is needed?", "The amount of {x} is {o}."),
     ("How much {x} do we need?", "The amount of {x} is {o}."),
     ("How many {x} are needed?", "The amount of {x} is {o}.")),
)  # fmt: skip
COUNT = Family(
    "count",
    {"n": just("n", lambda draw: draw.one(words.COUNTED)), "s": place},
    just("o", Draw.count),
    ("{s} has {o} {n}.", "there are {o} {n} in {s}.", "in {s} there are {o} {n}.",
     "{s} needs {o} {n}.", "we counted {o} {n} in {s}."),
    ("{s0}: {o} {n}", "{n} in {s}: {o}", "{s0}, {n}: {o}"),
    (("How many {n} does {s} have?", "The number of {n} in {s} is {o}."),
     ("How many {n} are there in {s}?", "The number of {n} in {s} is {o}."),
     ("How many {n} are in {s}?", "The number of {n} in {s} is {o}.")),
)  # fmt: skip
WORKFORCE = Family(
    "workforce",
    {"n": just("n", lambda draw: draw.one(words.COUNTED)), "s": place, "v": verb},
    just("o", Draw.count),
    ("{s} {v3} {o} {n}.", "{s} {v3} {o} {n}.", "every year {s} {v3} {o} {n}."),
    ("{s0} {v3} {o} {n}",),
    (("How many {n} does {s} {v}?", "The number of {n} that {s} {v3} is {o}."),),
)  # fmt: skip
DURATION = Family(
    "duration",
    {"x": target, "v": task},
    just("o", lambda draw: draw.amount(words.SPANS)),
    ("{v} {x} for {o}.", "let {x} {v} for {o}.", "{x} {v} for {o}.", "{x} can be {vn} for {o}.",
     "{x} must be {vn} for {o}.", "we {v} {x} for {o}."),
    ("{v} {x}: {o}", "{x0} {vn} for {o}", "{v} {x} for {o}"),
    (("How long can {x} be {vn}?", "The time for {x} is {o}."),
     ("How long {do} {x} {v}?", "The time for {x} is {o}."),
     ("How long {be} {x} {vn}?", "The time for {x} is {o}."),
     ("How long do I {v} {x}?", "The time for {x} is {o}.")),
)  # fmt: skip
LASTING = Family(
    "lasting",
    {"e": just("e", lambda draw: draw.one((draw.event(), draw.thing())))},
    just("o", lambda draw: draw.amount(words.SPANS)),
    ("the {e} takes {o}.", "the {e} lasts {o}.", "the {e} lasts for {o}."),
    ("{e}: {o}", "{e} takes {o}", "{e} ({o})"),
    (("How long does the {e} take?", "The {e} takes {o}."),
     ("How long does the {e} last?", "The {e} lasts {o}."),
     ("How long is the {e}?", "The {e} takes {o}.")),
)  # fmt: skip
ROUTE = Family(
    "route",
    {"k": _vehicle, "d": _destination},
    just("o", lambda draw: draw.one((draw.digits(1, 3), draw.digits(1, 2), draw.code(4)))),
    ("{k} {o} goes to {d}.", "{k} {o} goes to {d}.", "take {k} {o} to {d}.",
     "{k} {o} runs to {d}.", "to get to {d} take {k} {o}.", "the {k} to {d} is {k} {o}."),
    ("{k} {o}: {d}", "{k} {o} to {d}", "{k} {o} goes to {d}", "{d}: {k} {o}"),
    (("Which {k} goes to {d}?", "The {k} to {d} is {k} {o}."),
     ("Which {k} runs to {d}?", "The {k} to {d} is {k} {o}."),
     ("What {k} do I take to {d}?", "The {k} to {d} is {k} {o}."),
     ("How do I get to {d} by {k}?", "The {k} to {d} is {k} {o}.")),
)  # fmt: skip
DEPARTURE = Family(
    "departure",
    {"k": _vehicle, "d": _destination},
    lambda draw: {**clock(draw), "l": (f"from {draw.one(('platform', 'gate', 'stop', 'pier'))} "
                                       f"{draw.code(3)}",)},
    ("the {k} to {d} leaves {o} {l}.", "the {k} to {d} leaves {l} {o}.",
     "the {k} to {d} departs {o} {l}."),
    ("{k} to {d}: {o0}, {l}", "{k} to {d} {o} {l}"),
    (("When does the {k} to {d} leave?", "The {k} to {d} leaves {o}."),
     ("Where does the {k} to {d} leave from?", "The {k} to {d} leaves {l}."),
     ("At what time does the {k} to {d} leave?", "The {k} to {d} leaves {o}.")),
)  # fmt: skip
MEASURE = Family(
    "measure",
    {"s": place, "a": just("a", lambda draw: draw.one(("old", "tall", "long", "wide", "deep",
                                                     "high", "big", "heavy", "far", "thick")))},
    just("o", lambda draw: draw.amount(("years", "m", "cm", "km", "miles", "kg", "metres"))),
    ("{s} is {o} {a}.", "{s} is about {o} {a}.", "{s} is only {o} {a}."),
    ("{s0}: {o} {a}", "{s0} {o} {a}"),
    (("How {a} is {s}?", "The {s0} is {o} {a}."),),
)  # fmt: skip
DECISION = Family(
    "decision",
    {},
    lambda draw: {"o": (f"{draw.one(words.REGULAR)} the {draw.thing()}"
                        f"{draw.one(('', ' ' + draw.when(), ' for ' + draw.place() + 's'))}",)},
    ("we decided to {o}.", "it was decided to {o}.", "we agreed to {o}.", "decision: {o}."),
    ("decision: {o}", "decided: {o}", "we decided to {o}"),
    (("What was decided?", "The decision is to {o}."), ("What did we decide?",
                                                      "The decision is to {o}."),
     ("What is the decision?", "The decision is to {o}.")),
)  # fmt: skip

# a family stands here as often as it is worth
FAMILIES: tuple[Family, ...] = (
    *(ATTRIBUTE,) * 7, *(PLAIN,) * 7, *PEOPLE_FAMILIES, EVENT, EVENT, GATHERING, PERSONAL, OPENING,
    HOURS, STATE, SCHEDULE, WHERE, WHERE, ABODE, BASED, PRICE, PRICE, FARE, NEEDED, NEEDED, COUNT,
    WORKFORCE, DURATION, LASTING, MEASURE, ROUTE, DEPARTURE, DECISION,
)  # fmt: skip
