"""The parts of an evaluation: items, tasks that create and score them, arms that answer them.

A new task is a class with `Task`'s members, entered in `catalog.TASKS`. A new way of answering (a
policy, MapReduce, another server) is a class with `Arm`'s members, entered in `catalog.ARMS`. `run`
and `figures` add resuming, intervals, rows, tables and plots."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Item:
    """A prompt of documents and a question, with its right answers.

    ``key`` identifies the item within its task, e.g. by its seed. The task defines whether all or
    any of ``answers`` are right. ``before`` is text before the documents. ``turns`` are further
    questions, which the output contains after each answer."""

    key: str
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    max_tokens: int = 96
    before: str = ""
    turns: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """A digest of the prompt and the maximal length, and of nothing else."""
        digest = hashlib.blake2b(digest_size=12)
        length = str(self.max_tokens)
        for text in (self.before, *self.documents, self.question, *self.turns, length):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


@dataclass(frozen=True)
class Answer:
    """An arm's answer to an item, with figures (recomputed share, pages read, ...)."""

    text: str
    report: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """A source of items, and their scorer."""

    @property
    def name(self) -> str:
        """The task's name on the command line and in rows."""
        ...

    @property
    def setting(self) -> str:
        """Its sizes, e.g. ``"2 hops, 6 documents"``."""
        ...

    def items(self, seeds: range) -> Sequence[Item]:
        """The items of these seeds; the same seed always gives the same item."""
        ...

    def score(self, item: Item, text: str) -> Mapping[str, float]:
        """Metrics of one answer, from 0 to 1, by name; the first is the main one."""
        ...


@runtime_checkable
class Arm(Protocol):
    """A way to answer items: a model with its policies."""

    @property
    def name(self) -> str:
        """The arm's name in rows, with its settings: ``"links, ratio 0.15"``."""
        ...

    def answer(self, items: Sequence[Item]) -> Sequence[Answer]:
        """One answer per item, in order."""
        ...
