"""Exact match on held-out worlds, by teacher forcing: every token of the answer is the likeliest.

That is the same as greedy decoding giving exactly the answer. Measures a model under training; the
figures of the package come from the engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from looseleaf.evals.world import WorldConfig, ask, make_world
from training.data import KINDS, Batch, Packer, Sample, SampleWriter
from training.step import DeviceBatch, Stepper

SUITE: tuple[tuple[str, int | None], ...] = (
    ("lookup", None), ("bridge", None), ("chain", 1), ("chain", 2), ("chain", 3),
    ("unanswerable", None),
)  # fmt: skip


@dataclass(frozen=True)
class EvalPlan:
    """What to measure: so many examples of every task, in chat or bare form."""

    examples: int = 300
    num_documents: int = 6
    chat: bool = True
    independent: bool = False
    first_seed: int = 1_000_000  # far below the training seeds


def held_out_samples(writer: SampleWriter, plan: EvalPlan) -> Iterator[Sample]:
    """One question to a context, of every task of the suite in turn."""
    for number in range(plan.examples):
        for task, hops in SUITE:
            for attempt in range(100):
                seed = plan.first_seed + 1_000 * number + attempt
                world = make_world(seed, WorldConfig(num_documents=plan.num_documents, hops=hops))
                question = ask(world, task, random.Random(seed), hops)
                if question is not None:
                    yield writer.write(
                        world.documents, [question], plan.chat, independent=plan.independent
                    )
                    break


def eval_batches(tokenizer: Tokenizer, plan: EvalPlan, shape: tuple[int, int]) -> Iterator[Batch]:
    """Every held-out sample once, packed; a sample longer than a row is an error."""
    packer, empty = Packer(*shape), True
    for sample in held_out_samples(SampleWriter(tokenizer), plan):
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


@torch.no_grad()
def exact_match(
    stepper: Stepper,
    tokenizer: Tokenizer,
    plan: EvalPlan,
    shape: tuple[int, int],
    engine_rule: bool = False,
) -> dict[str, float]:
    """Share of answers that are right word for word, per kind."""
    exact = torch.zeros(len(KINDS), device=stepper.device)
    total = torch.zeros(len(KINDS), device=stepper.device)
    for batch in eval_batches(tokenizer, plan, shape):
        _, right, asked = stepper(DeviceBatch.of(batch, stepper.device), engine_rule)
        exact += right
        total += asked
    pairs = zip(KINDS, exact.tolist(), total.tolist(), strict=True)
    return {kind: right / asked for kind, right, asked in pairs if asked}


def table(results: dict[str, dict[str, float]]) -> str:
    """One line per setting, one column per kind."""
    kinds = [kind for kind in KINDS if any(kind in row for row in results.values())]
    lines = [" " * 24 + " ".join(f"{kind[:9]:>9}" for kind in kinds)]
    for name, row in results.items():
        cells = (f"{row[kind]:9.3f}" if kind in row else " " * 9 for kind in kinds)
        lines.append(f"{name:24}" + " ".join(cells))
    return "\n".join(lines)
