"""Text without answers: titles, idle sentences, and prose that is foreign to the world."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from looseleaf_lab.evals.world import words

TITLES: tuple[str, ...] = (
    "Handbook of {org}.", "Notes from {org}.", "{org} handbook", "Minutes of the {event}.",
    "A letter to {person}.", "Report on {place}.", "# {org}", "News from {place}.",
    "About {place}", "Page {digits}.", "{place}: a short guide.", "Memo from {person}.",
)  # fmt: skip

_IDLE: tuple[str, ...] = (
    "Please read this page with care.",
    "More details will follow next {day}.",
    "The {noun} was {adjective} this {month}.",
    "We thank everyone for the {adjective} {noun}.",
    "Nothing else has changed since {month}.",
    "The {adjective} {noun} is still being discussed.",
    "Questions about the {noun} are welcome.",
    "It was a {adjective} {month} with many visitors.",
    "No {noun} was found near the {noun}.",
    "Some people {verb} the {noun} every {day}.",
    "This page replaces the one from {month}.",
    "{person} visited us last {month}.",
    "{person} and {person} met in {place} last {day}.",
    "On {day} the {noun} was closed.",
    "Many {goods} were sold in {place}.",
    "The road to {place} is {adjective} in {month}.",
    "Copies of this page can be found near the {noun}.",
    "In {month} the {adjective} {noun} will be painted.",
)

FOREIGN_QUESTIONS: tuple[str, ...] = (
    "What is the {noun} of the {noun}?", "Who is the {noun}?", "Why did the {noun} {verb}?",
    "How does a {noun} {verb} the {noun}?", "What is {adjective} about the {noun}?",
    "What does this text say about {noun}?", "Who wrote this?", "Where is the {noun}?",
    "When was the {noun} {adjective}?", "How many {goods} are there?", "Who is {person}?",
    "Can you {verb} the {noun}?", "What is {place}?", "Hello", "What is this about?",
    "Does {person} {verb} the {noun}?", "What should I {verb}?", "What is a {noun}?",
    "How {adjective} is the {noun}?", "Tell me about {place}.", "Which {noun} did {person} {verb}?",
    "{word} {word} {word} {word}?", "What is the capital of {place}?", "How are you?",
)  # fmt: skip


class Filler:
    """Fills templates with words, and with names from the given source."""

    def __init__(self, rng: random.Random, name: Callable[[], str]) -> None:
        self.rng = rng
        self._name = name

    def _slot(self, slot: str) -> str:
        rng = self.rng
        lists = {
            "noun": words.COMMON, "adjective": words.ADJECTIVES, "verb": words.VERBS,
            "day": words.DAYS, "month": words.MONTHS, "goods": words.GOODS,
        }  # fmt: skip
        if slot in lists:
            return rng.choice(lists[slot])
        if slot == "person":
            return f"{self._name()} {self._name()}"
        if slot == "org":
            return f"the {self._name()} {rng.choice(words.ORGS)}"
        if slot == "event":
            return f"{rng.choice(words.TOPIC_FIRST)} {rng.choice(words.EVENTS)}"
        if slot == "word":
            return rng.choice(rng.choice((words.COMMON, words.VERBS, words.GLUE)))
        return str(rng.randint(1, 99)) if slot == "digits" else self._name()

    def fill(self, template: str) -> str:
        text = re.sub(r"\{(\w+)\}", lambda slot: self._slot(slot[1]), template)
        return text[0].upper() + text[1:]

    def title(self) -> str:
        return self.fill(self.rng.choice(TITLES))

    def idle(self) -> str:
        return self.fill(self.rng.choice(_IDLE))

    def foreign_question(self) -> str:
        return self.fill(self.rng.choice(FOREIGN_QUESTIONS))

    def _foreign_word(self) -> str:
        rng = self.rng
        form = rng.random()
        if form < 0.42:
            return rng.choice(words.GLUE)
        if form < 0.62:
            return rng.choice(words.COMMON) + rng.choice(("", "", "", "s"))
        if form < 0.76:
            return rng.choice(words.VERBS) + rng.choice(("", "", "s", "ed", "ing"))
        if form < 0.86:
            return rng.choice(words.ADJECTIVES)
        if form < 0.93:
            return self._name()
        if form < 0.96:
            return str(rng.randint(0, 5000))
        letters = "abcdefghijklmnopqrstuvwxyz" * 3 + "éüßñ_ABCXYZ"
        return "".join(rng.choices(letters, k=rng.randint(2, 9)))

    def foreign_sentence(self) -> str:
        rng = self.rng
        sentence_words = [self._foreign_word() for _ in range(rng.randint(4, 18))]
        for i in range(len(sentence_words) - 1):
            if rng.random() < 0.08:
                sentence_words[i] += rng.choice((",", ",", ",", ";", ":", "-", "(", ")", '"', "’"))
        text = " ".join(sentence_words)
        return text[0].upper() + text[1:] + rng.choice(("....", "..", ".", "?", "!", ":"))[:1]

    def foreign_text(self, sentences: int) -> str:
        rng = self.rng
        pieces: list[str] = []
        for _ in range(sentences):
            pieces.append(self.foreign_sentence())
            pieces.append("\n\n" if rng.random() < 0.1 else "\n" if rng.random() < 0.1 else " ")
        return "".join(pieces[:-1])
