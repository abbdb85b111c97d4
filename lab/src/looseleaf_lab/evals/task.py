"""What an evaluation is made of: items, tasks that make and score them, arms that answer them.

A new task is one class with `Task`'s members, entered in `catalog.TASKS`; a new way of answering
(a policy, MapReduce, another server) is one class with `Arm`'s members, entered in `catalog.ARMS`.
Everything else, resuming, intervals, rows, tables and plots, comes with `run` and `figures`."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Item:
    """One thing that is asked and scored: a prompt of documents and a question, and what is right.

    ``key`` names it within its task, e.g. the seed it was made from. What several ``answers`` mean
    (all of them, any of them) is the task's affair. ``before`` is text in front of the documents.
    ``turns`` are further questions that stand in the output itself, one after each answer.
    """

    key: str
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    max_tokens: int = 96
    before: str = ""
    turns: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """The same for the same prompt and length, and for nothing else."""
        digest = hashlib.blake2b(digest_size=12)
        length = str(self.max_tokens)
        for text in (self.before, *self.documents, self.question, *self.turns, length):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


@dataclass(frozen=True)
class Answer:
    """What an arm said to an item, and figures about how (a share recomputed, pages read, ...)."""

    text: str
    report: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """A source of items, and their scorer."""

    @property
    def name(self) -> str:
        """What the task is called on the command line and in rows."""
        ...

    @property
    def setting(self) -> str:
        """Its sizes, e.g. ``"2 hops, 6 documents"``."""
        ...

    def items(self, seeds: range) -> Sequence[Item]:
        """The items of these seeds; the same seed always gives the same item."""
        ...

    def score(self, item: Item, text: str) -> Mapping[str, float]:
        """Metrics of one answer, from 0 to 1, by name; the first is the one to look at."""
        ...


@runtime_checkable
class Arm(Protocol):
    """A way of answering: a model with its policies."""

    @property
    def name(self) -> str:
        """What it is called in rows, with its settings: ``"links, ratio 0.15"``."""
        ...

    def answer(self, items: Sequence[Item]) -> Sequence[Answer]:
        """One answer for each item, in order."""
        ...
