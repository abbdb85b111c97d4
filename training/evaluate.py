"""Exact match on held-out worlds, by teacher forcing: every token of the answer is the likeliest.

That is the same as greedy decoding giving exactly the answer. Measures a model under training; the
figures of the package come from the engine.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from looseleaf_lab.evals.world import (
    MAX_HOPS,
    Example,
    Question,
    WorldDocument,
    make_deep_chain,
    make_example,
    make_look_alike,
    make_needle,
    make_roll_call,
)
from training.data import KINDS, Batch, Packer, Sample, SampleWriter
from training.step import DeviceBatch, Stepper

SUITE: tuple[tuple[str, int | None], ...] = (
    ("lookup", None), ("bridge", None), ("chain", 1), ("chain", 2), ("chain", 3), ("chain", 4),
    ("unanswerable", None), ("look-alike", None),
)  # fmt: skip
NEEDLES = (1_024, 2_048, 4_096, 8_192, 12_288, 16_384)
ROLL_CALL_LENGTH = 8_192  # of a row that any roll-call of 40 lines fits


@dataclass(frozen=True)
class EvalPlan:
    """What to measure: so many examples of every task, in chat or bare form."""

    examples: int = 300
    num_documents: int = 6
    chat: bool = True
    independent: bool = False
    first_seed: int = 1_000_000  # far below the training seeds


def _sample(writer: SampleWriter, example: Example, plan: EvalPlan) -> Sample:
    documents = tuple(WorldDocument(text) for text in example.documents)
    question = Question(example.question, example.answer, example.task, example.hops)
    return writer.write(documents, [question], plan.chat, independent=plan.independent)


def held_out_samples(writer: SampleWriter, plan: EvalPlan) -> Iterator[Sample]:
    """One question to a context, of every task of the suite in turn."""
    for number in range(plan.examples):
        seed = plan.first_seed + 1_000 * number
        for task, hops in SUITE:
            if task == "look-alike":
                yield _sample(writer, make_look_alike(seed, plan.num_documents), plan)
            elif hops is not None and hops > MAX_HOPS:
                yield _sample(writer, make_deep_chain(seed, hops, plan.num_documents), plan)
            else:
                example = make_example(task, seed, num_documents=plan.num_documents, hops=hops)
                yield _sample(writer, example, plan)


def roll_call_samples(writer: SampleWriter, plan: EvalPlan) -> Iterator[Sample]:
    """Forty questions answered in one output, over fifty documents."""
    for seed in range(plan.first_seed, plan.first_seed + max(1, plan.examples // 5)):
        call = make_roll_call(seed)
        example = Example(call.documents, call.question, call.answer, "roll-call", 0)
        yield _sample(writer, example, plan)


def needle_samples(writer: SampleWriter, plan: EvalPlan, tokens: int) -> Iterator[Sample]:
    """A fact in a context of so many tokens, at all depths in turn."""
    for seed in range(plan.first_seed, plan.first_seed + plan.examples):
        needle = make_needle(seed, tokens, count=lambda text: len(writer.encode(text)))
        yield _sample(writer, needle, plan)


def eval_batches(tokenizer: Tokenizer, plan: EvalPlan, shape: tuple[int, int]) -> Iterator[Batch]:
    """Every held-out sample once, packed."""
    return packed(held_out_samples(SampleWriter(tokenizer), plan), shape)


def packed(samples: Iterator[Sample], shape: tuple[int, int]) -> Iterator[Batch]:
    """Every sample once; one longer than a row is an error."""
    packer, empty = Packer(*shape), True
    for sample in samples:
        if packer.add(sample):
            empty = False
            continue
        if not empty:
            yield packer.batch()
        packer, empty = Packer(*shape), False
        if not packer.add(sample):
            raise ValueError(f"{len(sample.tokens)} tokens do not fit a row of {shape[1]}")
    if not empty:
        yield packer.batch()


def score(stepper: Stepper, batches: Iterable[Batch]) -> dict[str, float]:
    """Share of answers that are right word for word, per kind.

    Gradients stay on, though nobody asks for them: the model is compiled for that already.
    """
    exact = torch.zeros(len(KINDS), device=stepper.device)
    total = torch.zeros(len(KINDS), device=stepper.device)
    for batch in batches:
        _, right, asked = stepper(DeviceBatch.of(batch, stepper.device))
        exact += right.detach()
        total += asked.detach()
    pairs = zip(KINDS, exact.tolist(), total.tolist(), strict=True)
    return {kind: right / asked for kind, right, asked in pairs if asked}


def exact_match(
    stepper: Stepper, tokenizer: Tokenizer, plan: EvalPlan, shape: tuple[int, int]
) -> dict[str, float]:
    """`score` of the suite on held-out worlds."""
    return score(stepper, eval_batches(tokenizer, plan, shape))


class Exam:
    """The held-out batches of all tasks, made once, by a process of its own."""

    def __init__(self, tokenizer_file: str, examples: int, shape: tuple[int, int]) -> None:
        self._sets: dict[str, list[Batch]] | None = None
        context = multiprocessing.get_context("fork")
        self._receive, send = context.Pipe(duplex=False)
        arguments = (tokenizer_file, examples, shape)
        self._process = context.Process(
            target=lambda: send.send(exam_sets(*arguments)), daemon=True
        )
        self._process.start()
        send.close()  # or a process that failed would be waited for

    def take(self, stepper: Stepper) -> dict[str, float]:
        """The share that is right, by task; needles by length; `alone` with documents apart."""
        if self._sets is None:
            self._sets = self._receive.recv()
            self._process.join()
        marks: dict[str, float] = {}
        for name, batches in self._sets.items():
            for kind, share in score(stepper, batches).items():
                if kind != "inherited":
                    marks[f"{name} {kind}".strip()] = share
        return marks


def exam_sets(tokenizer_file: str, examples: int, shape: tuple[int, int]) -> dict[str, list[Batch]]:
    """Batches by what stands before the kind in the name of their marks."""
    writer = SampleWriter(Tokenizer.from_file(tokenizer_file))
    plan = EvalPlan(examples)
    alone = EvalPlan(max(1, examples // 2), independent=True)
    sets = {
        "": list(packed(held_out_samples(writer, plan), shape)),
        "alone": list(packed(held_out_samples(writer, alone), shape)),
    }
    if shape[1] >= ROLL_CALL_LENGTH:
        sets["40"] = list(packed(roll_call_samples(writer, plan), shape))
    few = EvalPlan(max(1, examples // 3))
    for tokens in (t for t in NEEDLES if t * 1.1 < shape[1]):
        sets[str(tokens)] = list(packed(needle_samples(writer, few, tokens), shape))
    return sets


def table(results: dict[str, dict[str, float]]) -> str:
    """One line per setting, one column per kind."""
    kinds = [kind for kind in KINDS if any(kind in row for row in results.values())]
    lines = [" " * 24 + " ".join(f"{kind[:9]:>9}" for kind in kinds)]
    for name, row in results.items():
        cells = (f"{row[kind]:9.3f}" if kind in row else " " * 9 for kind in kinds)
        lines.append(f"{name:24}" + " ".join(cells))
    return "\n".join(lines)
