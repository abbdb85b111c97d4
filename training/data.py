"""Turns worlds into token rows: samples in chat or bare form, packed end to end, with their labels.

Text parts are tokenised one by one, never across the seams between template and text, as the
engine does. No torch here, so that worker processes start quickly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from looseleaf_lab.evals.world import (
    NO_ANSWER,
    TRAINING_SEEDS_START,
    Question,
    World,
    WorldConfig,
    WorldDocument,
    ask,
    call_roll,
    make_world,
)
from training import tokenizer as names
from training.everyday import compose

KINDS = (
    "lookup", "bridge", "chain1", "chain2", "chain3", "unanswerable", "inherited", "repeat",
    "note", "note_unsaid", "chain4", "look-alike", "roll-call", "needle", "foretold",
)  # fmt: skip
LEAD, TEXT = 0, 127
NO_LOSS, FAINT, FULL = 0, 1, 2
MAX_ANSWERS = 4_096  # answers counted in one batch
MAX_LINES = 50  # of a roll-call

SYSTEM_PROMPTS = (
    "You answer from the documents.",
    "Answer the question with the help of the documents.",
    "You are a helpful assistant. If the documents do not say, say so.",
    "Be brief.",
    "Answer in a full sentence.",
    "You are a careful reader who answers questions about documents.",
)


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: how long its contexts are, and what it asks."""

    name: str
    documents: tuple[int, int] = (1, 8)
    facts: tuple[int, int] = (3, 6)
    fillers: tuple[int, int] = (0, 3)
    questions: tuple[int, int] = (6, 10)
    foreign: float = 0.05
    induction: bool = False
    independent: float = 0.0  # share of samples whose documents are encoded independently
    fused: float = 0.0  # share whose documents are, but for the words that hand a value on
    chains: float = 0.22  # share of questions about chains
    unanswerable: float = 0.11
    everyday: float = 0.0  # share of samples about everyday notes instead of a world
    max_hops: int = 3
    look_alikes: float = 0.0  # facts that nearly match another, per fact
    roll_calls: float = 0.0  # share of samples that end in a roll-call
    foretold: bool = False  # see `Form`
    run_on: float = 0.0  # share of conversations whose turns have no end marks between them
    long_samples: int = 0  # at the head of every batch, of `long_tokens` each
    long_tokens: tuple[int, int] = (0, 0)
    until: float | None = None  # ends at this share of the schedule, not by mastery


@dataclass
class Sample:
    """One packed sample, token by token. `answer` numbers the answers from 1, 0 is none."""

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)  # the token itself, but for inherited values
    weight: list[int] = field(default_factory=list)
    part: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def add(self, tokens: list[int], part: int, weight: int = FAINT, answer: int = 0) -> None:
        self.tokens += tokens
        self.labels += tokens
        self.weight += [weight] * len(tokens)
        self.part += [part] * len(tokens)
        self.answer += [answer] * len(tokens)

    def begin_answer(self, kind: int) -> int:
        self.kinds.append(kind)
        return len(self.kinds)

    def expect(self, place: int, label: int, kind: int) -> None:
        """Ask for `label` at `place`, whatever token stands there."""
        self.labels[place] = label
        self.weight[place] = FULL
        self.answer[place] = self.begin_answer(kind)


@dataclass(frozen=True)
class Form:
    """How a conversation is written, besides what the engine can tell apart.

    `run_on`: only the first question and the last answer end in an end mark. `fused`: documents on
    their own, but for the word before an inherited value, which reads all before it. `foretold`:
    the end mark of a question is asked for the last word of its answer, so that the question, and
    not only the answer, reads where that word stands.
    """

    run_on: bool = False
    fused: bool = False
    foretold: bool = False


PLAIN = Form()


def kind_of(question: Question) -> int:
    # worlds with more marks than words for them hand some on further than they should
    name = f"chain{min(question.hops, 4)}" if question.task == "chain" else question.task
    return KINDS.index(name)


class SampleWriter:
    """Writes samples with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self._special = {name: ids[name] for name in names.SPECIAL_TOKENS}
        self.vocab_size = len(ids)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def _open(self, sample: Sample, system: str | None, chat: bool) -> None:
        sample.add([self._special[names.BEGIN]], LEAD, NO_LOSS)
        if system is not None:
            sample.add([self._special[names.SYSTEM]], LEAD)
            sample.add([*self.encode(system), self._special[names.END]], LEAD)
        if chat:
            sample.add([self._special[names.USER]], LEAD)

    def _document(
        self, sample: Sample, document: WorldDocument, part: int, labelled: bool, fused: bool
    ) -> None:
        sample.add([self._special[names.DOCUMENT]], part)
        done = 0
        for offset, value in document.inherited if labelled else ():
            sample.add(self.encode(document.text[done:offset]), part)
            place = len(sample.tokens)
            done = offset + 1 + document.text[offset + 1 :].index(".")
            sample.add(self.encode(document.text[offset:done]), part)
            sample.expect(place, self.encode(" " + value)[0], KINDS.index("inherited"))
            if fused:
                sample.part[place - 1] = TEXT  # the word before the value reads everything
        sample.add(self.encode(document.text[done:]), part)
        sample.add([self._special[names.END]], part)

    def _answer(self, sample: Sample, question: Question, chat: bool, ends: bool) -> None:
        """An answer; of a roll-call each line counts as one."""
        text = question.answer if chat else " " + question.answer
        lines = text.split("\n") if question.task == "roll-call" else [text]
        for number, line in enumerate(lines):
            answer = sample.begin_answer(kind_of(question))
            sample.add(self.encode("\n" + line if number else line), TEXT, FULL, answer)
        if ends:
            sample.add([self._special[names.END]], TEXT, FULL, answer)

    def _ask(
        self, sample: Sample, question: Question, chat: bool, run_on: bool, foretold: bool
    ) -> None:
        sample.add(self.encode(question.text), TEXT)
        if not chat:
            return
        end = [] if run_on else [self._special[names.END]]
        sample.add([*end, self._special[names.ASSISTANT]], TEXT)
        if foretold and question.task != "roll-call" and question.answer != NO_ANSWER:
            last = " " + question.answer.rstrip(".").split(" ")[-1]
            place = len(sample.tokens) - 1  # predicted at the end mark
            sample.expect(place, self.encode(last)[0], KINDS.index("foretold"))

    def write(
        self,
        documents: tuple[WorldDocument, ...],
        questions: list[Question],
        chat: bool,
        system: str | None = None,
        independent: bool = False,
        form: Form = PLAIN,
    ) -> Sample:
        """A conversation about the documents, or in bare form its first question only."""
        sample = Sample()
        self._open(sample, system, chat)
        for number, document in enumerate(documents, 1):
            self._document(sample, document, number, not independent, form.fused)
        asked = questions if chat else questions[:1]
        for number, question in enumerate(asked):
            if number:
                sample.add([self._special[names.USER]], TEXT)
            joined = form.run_on and number > 0
            self._ask(sample, question, chat, joined, form.foretold and not joined)
            self._answer(sample, question, chat, not form.run_on or number == len(asked) - 1)
        if not (independent or form.fused):
            sample.part = [TEXT] * len(sample.part)
        return sample


def questions_about(world: World, stage: Stage, rng: random.Random, wanted: int) -> list[Question]:
    """Different questions, at most so many, of all tasks in the stage's shares."""
    answerable = 1.0 - stage.unanswerable - stage.chains
    tasks = ("lookup", "bridge", "mark", "chain", "unanswerable")
    weights = (0.5 * answerable, 0.4 * answerable, 0.1 * answerable)
    # a long chain as often as there are short ones on the way to it
    depths = [hops for hops in {mark.hops for mark in world.marks} for _ in range(hops)]
    chosen: list[Question] = []
    for _ in range(wanted):
        task = rng.choices(tasks, (*weights, stage.chains, stage.unanswerable))[0]
        hops = rng.choice(depths) if task == "chain" and depths else None
        question = ask(world, task, rng, hops)
        # an unanswerable question claims its subject but hides it: no document changes
        if question is not None and all(question.text != q.text for q in chosen):
            chosen.append(question)
    return chosen


def roll_call_about(world: World, rng: random.Random) -> list[Question]:
    """One long question about as many facts as the world and a roll-call may have."""
    most = min(MAX_LINES, len(world.facts))
    if most < 2:
        return []
    call = call_roll(world, rng.randint(2, most), rng)
    return [Question(call.question, call.answer, "roll-call")]


def _foreign(world: World, stage: Stage, rng: random.Random) -> tuple[WorldDocument, ...]:
    """The documents, sometimes with a page of foreign prose among them."""
    documents = list(world.documents)
    if rng.random() < 4 * stage.foreign:
        page = WorldDocument(world.filler.foreign_text(rng.randint(1, 10)))
        documents.insert(rng.randint(0, len(documents)), page)
    return tuple(documents)


def draw_sample(writer: SampleWriter, seed: int, stage: Stage) -> Sample:
    """The training sample of this seed."""
    rng = random.Random(seed)
    if stage.induction:
        return induction_sample(rng, writer.vocab_size)
    if stage.everyday and rng.random() < stage.everyday:
        return everyday_sample(writer, rng, stage)
    num_documents = rng.randint(*stage.documents)
    # long chains are rarer than short ones in any world, and harder: force more of them
    longest = min(stage.max_hops, num_documents - 1)
    hops = rng.choices(range(longest + 1), (1, 1, 2, 3, 4)[: longest + 1])[0]
    config = WorldConfig(
        num_documents, stage.facts, stage.fillers, hops=hops, shown=0.25, foreign=stage.foreign,
        max_hops=stage.max_hops, look_alikes=stage.look_alikes,
    )  # fmt: skip
    world = make_world(TRAINING_SEEDS_START + seed, config)
    questions = questions_about(world, stage, rng, rng.randint(*stage.questions))
    if rng.random() < stage.roll_calls:
        questions = rng.choice((questions[:2], [])) + roll_call_about(world, rng)
    documents = _foreign(world, stage, rng)
    if rng.random() < stage.foreign * 0.6:  # nothing but foreign prose, or nothing at all
        pages = rng.randint(0, 3)
        texts = (world.filler.foreign_text(rng.randint(2, 9)) for _ in range(pages))
        documents = tuple(WorldDocument(text) for text in texts)
        asked = (ask(world, "unanswerable", rng) for _ in range(4))
        questions = [question for question in asked if question is not None]
    chat = rng.random() < 0.75
    system = system_prompt(world, rng)
    independent, run_on = rng.random() < stage.independent, rng.random() < stage.run_on
    form = Form(run_on, not independent and rng.random() < stage.fused, stage.foretold)
    return writer.write(documents, questions, chat, system, independent, form)


def system_prompt(world: World, rng: random.Random) -> str | None:
    """In three conversations of ten one, now and then of foreign words."""
    if rng.random() >= 0.3:
        return None
    foreign = rng.random() < 0.2
    return world.filler.foreign_sentence() if foreign else rng.choice(SYSTEM_PROMPTS)


def everyday_sample(writer: SampleWriter, rng: random.Random, stage: Stage) -> Sample:
    """Everyday notes and what can and cannot be read in them."""
    note = compose(rng)
    documents = tuple(WorldDocument(text) for text in note.texts)
    questions = [
        Question(text, answer, "note" if said else "note_unsaid")
        for text, answer, said in note.asked
    ]
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None
    chat = rng.random() < 0.85 or not questions
    independent, form = rng.random() < stage.independent, Form(foretold=stage.foretold)
    return writer.write(documents, questions, chat, system, independent, form)


def induction_sample(rng: random.Random, vocab_size: int) -> Sample:
    """Random tokens, then repeats of their parts, which can be told once two tokens are out."""
    ordinary = len(names.SPECIAL_TOKENS)
    sample = Sample()
    length = rng.randint(24, 160)
    source = [rng.randrange(ordinary, vocab_size) for _ in range(length)]
    sample.add(source, TEXT, NO_LOSS)
    for _ in range(rng.randint(4, 10)):
        span = rng.randint(4, 16)
        start = rng.randrange(0, length - span)
        answer = sample.begin_answer(KINDS.index("repeat"))
        sample.add(source[start : start + 2], TEXT, NO_LOSS)
        sample.add(source[start + 2 : start + span], TEXT, FULL, answer)
    return sample


@dataclass(frozen=True)
class Batch:
    """Packed rows, [rows, length]; `labels`, `weight` and `answer` are those of the next token."""

    tokens: npt.NDArray[np.int16]
    labels: npt.NDArray[np.int16]
    weight: npt.NDArray[np.uint8]
    sample: npt.NDArray[np.int16]
    part: npt.NDArray[np.int8]
    answer: npt.NDArray[np.int16]
    kinds: npt.NDArray[np.int8]  # of each answer, -1 where there is none; number 0 is unused
    num_tokens: int


class Packer:
    """Fills rows with samples, each into the fullest row that still holds it."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self._filled = [0] * rows
        shape = (rows, length)
        self._arrays = {
            name: np.zeros(shape, dtype)
            for name, dtype in (("tokens", np.int16), ("labels", np.int16), ("weight", np.uint8),
                                ("sample", np.int16), ("part", np.int8), ("answer", np.int16))
        }  # fmt: skip
        self._arrays["part"][:] = TEXT
        self._kinds = np.full(MAX_ANSWERS, -1, np.int8)
        self._num_answers, self._num_samples = 1, 1

    def add(self, sample: Sample) -> bool:
        """Place a sample; false if no row has room for it."""
        size = len(sample.tokens)
        fits = [row for row in range(self.rows) if self._filled[row] + size <= self.length]
        full = self._num_answers + len(sample.kinds) > MAX_ANSWERS
        if not fits or full:
            return False
        row = max(fits, key=self._filled.__getitem__)
        start, stop = self._filled[row], self._filled[row] + size
        arrays = self._arrays
        arrays["tokens"][row, start:stop] = sample.tokens
        arrays["part"][row, start:stop] = sample.part
        arrays["sample"][row, start:stop] = self._num_samples
        # what the next token should be, and how much it matters
        arrays["labels"][row, start : stop - 1] = sample.labels[1:]
        arrays["weight"][row, start : stop - 1] = sample.weight[1:]
        answers = np.asarray(sample.answer[1:], np.int16)
        arrays["answer"][row, start : stop - 1] = np.where(
            answers > 0, answers + (self._num_answers - 1), 0
        )
        self._kinds[self._num_answers : self._num_answers + len(sample.kinds)] = sample.kinds
        self._num_answers += len(sample.kinds)
        self._num_samples += 1
        self._filled[row] = stop
        return True

    def batch(self) -> Batch:
        return Batch(**self._arrays, kinds=self._kinds, num_tokens=sum(self._filled))


def pack(samples: Iterator[Sample], rows: int, length: int, patience: int = 12) -> Batch:
    """One batch from the stream; a few samples that no longer fit are dropped."""
    packer = Packer(rows, length)
    for sample in samples:
        if not packer.add(sample):
            patience -= 1
        if patience <= 0:
            break
    return packer.batch()
