"""Makers of the slots and values of everyday facts: what is drawn, in all the forms it takes."""

from __future__ import annotations

from collections.abc import Callable

from training.everyday import words
from training.everyday.draw import Draw

Forms = dict[str, tuple[str, ...]]  # field of a template: what may stand there
Maker = Callable[[Draw], Forms]


def just(field: str, make: Callable[[Draw], str]) -> Maker:
    return lambda draw: {field: (make(draw),)}


def holder(draw: Draw) -> Forms:
    s = draw.holder()
    return {"s": (s,), "s0": (s[4:],)} if s.startswith("the ") else {"s": (s,)}


def verb(draw: Draw) -> Forms:
    if draw.rng.random() < 0.3:
        v, v3, vd, vn = words.IRREGULAR[draw.rng.randrange(len(words.IRREGULAR))]
    else:
        v = draw.invented() if draw.rng.random() < 0.1 else draw.one(words.REGULAR)
        v3, vd = _third(v), _past(v)
        vn = vd
    return {"v": (v,), "v3": (v3,), "vd": (vd,), "vn": (vn,)}


def _third(verb: str) -> str:
    if verb[-1] == "y" and verb[-2] not in "aeou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z")) else "s")


def _past(verb: str) -> str:
    if verb[-1] == "y" and verb[-2] not in "aeou":
        return verb[:-1] + "ied"
    if verb[-1] == "e":
        return verb + "d"
    doubled = len(verb) <= 4 and verb[-1] in "pnmb" and verb[-2] in "aeiou" and verb != "open"
    return verb + (verb[-1] if doubled and verb[-3] not in "aeiou" else "") + "ed"


def target(draw: Draw) -> Forms:
    """Something that is done or stands somewhere; plurals come with and without "the"."""
    form = draw.rng.random()
    one = {"be": ("is",), "do": ("does",), "was": ("was",), "has": ("has",)}
    if form < 0.45:
        x = draw.plural()
        many = {"be": ("are",), "do": ("do",), "was": ("were",), "has": ("have",)}
        return {"x": (x, f"the {x}"), "x0": (x,), **many}
    if form < 0.55:
        x = draw.one(words.MASS)
        return {"x": (x, f"the {x}"), "x0": (x,), **one}
    x = draw.place() if form < 0.62 else draw.thing()
    return {"x": (f"the {x}",), "x0": (x,), **one}


def task(draw: Draw) -> Forms:
    """What takes its time."""
    v = draw.one(words.RESTING)
    if draw.rng.random() < 0.5:
        return verb(draw)
    return {"v": (v,), "v3": (_third(v),), "vd": (_past(v),), "vn": (_past(v),)}


def creature(draw: Draw) -> Forms:
    x = draw.described(draw.one(words.ANIMALS)) if draw.rng.random() < 0.4 else draw.thing()
    return {"x": (f"the {x}",), "x0": (x,)}


def thing(draw: Draw) -> Forms:
    x = draw.thing()
    return {"x": (f"the {x}",), "x0": (x,)}


def opener(draw: Draw) -> Forms:
    form = draw.rng.random()
    s = draw.place() if form < 0.6 else draw.event() if form < 0.8 else draw.thing()
    base, third = words.OPENING[draw.rng.randrange(len(words.OPENING))]
    first = draw.one(("last ", "first ", "next ")) if draw.rng.random() < 0.15 else ""
    return {"s": (f"the {first}{s}",), "s0": (first + s,), "v": (base,), "v3": (third,)}


def place(draw: Draw) -> Forms:
    s = draw.place()
    return {"s": (f"the {s}",), "s0": (s,)}


def when(draw: Draw) -> Forms:
    o = draw.when()
    return {"o": (o,), "o0": (o.split(" ", 1)[1],)}


def clock(draw: Draw) -> Forms:
    t = draw.clock()
    return {"o": (f"at {t}",), "o0": (t,)}


def where(draw: Draw) -> Forms:
    o = draw.where()
    return {"o": (o,), "o0": (o.split(" ", 1)[1],)} if o.startswith("in ") else {"o": (o,)}


def hours(draw: Draw) -> Forms:
    start = draw.rng.randint(5, 12)
    minutes = draw.one((":00", ":30", ":15", ":45")) if draw.rng.random() < 0.7 else ""
    return {"o": (f"{start}{minutes}",), "u": (f"{draw.rng.randint(13, 23)}{minutes}",)}
