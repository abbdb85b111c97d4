"""Events of an answer that is read piece by piece: content, reasoning, calls and markup."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text that the client shows."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's thoughts."""

    text: str


@dataclass(frozen=True)
class Markup:
    """The raw text of calls, tags, and blanks between calls; clients do not see it."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The beginning of call ``index``, counted from 0 in one answer."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a call."""

    index: int


Event = Content | Reasoning | Markup | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True)
class Call:
    """A complete call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Parsed:
    """A complete answer; ``content`` and ``reasoning`` are empty where the answer has none."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def join(events: Iterable[Event]) -> list[Event]:
    """``events`` with adjacent pieces of one text joined."""
    joint: list[Event] = []
    for event in events:
        last = joint[-1] if joint else None
        if isinstance(event, Content | Reasoning | Markup) and type(last) is type(event):
            joint[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            joint[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joint.append(event)
    return joint


def collect(events: Iterable[Event]) -> Parsed:
    """The complete answer of a finished sequence of events."""
    texts: dict[type, list[str]] = {Content: [], Reasoning: []}
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, Content | Reasoning):
            texts[type(event)].append(event.text)
        elif isinstance(event, CallBegin):
            names.append(event.name)
            arguments.append([])
        elif isinstance(event, CallArguments):
            arguments[event.index].append(event.text)
    calls = tuple(Call(n, "".join(a)) for n, a in zip(names, arguments, strict=True))
    return Parsed("".join(texts[Content]), "".join(texts[Reasoning]), calls)
