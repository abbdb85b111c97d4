"""Contexts of thousands of tokens, asked so often that few of their tokens are wasted.

Needles are facts in idle talk; the others are worlds of many documents. Both are asked question by
question and as roll-calls.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from looseleaf_lab.evals.world import (
    TRAINING_SEEDS_START,
    Question,
    World,
    WorldConfig,
    WorldDocument,
    make_world,
)
from training.data import (
    TEXT,
    Form,
    Sample,
    SampleWriter,
    Stage,
    questions_about,
    roll_call_about,
    system_prompt,
)

_TOKENS_PER_SENTENCE = 13
_TOKENS_PER_QUESTION = 38  # with its answer
_ASKED_SHARE = 0.2  # of a sample's tokens that are questions and answers, at most
_LEAST_SHARE = 0.02
_PAGE = 24  # sentences, as in the needles of the evaluation


def draw_long(writer: SampleWriter, seed: int, stage: Stage) -> Sample:
    """A sample of about `stage.long_tokens` tokens, never many more than the most."""
    rng = random.Random(f"long {seed}")
    least, most = stage.long_tokens
    if rng.random() < 0.7:
        length = rng.randint(least, most)
    else:
        length = round(math.exp(rng.uniform(math.log(least), math.log(most))))
    # often so few that nearly all of the length is left to the documents
    share = _ASKED_SHARE * (_LEAST_SHARE / _ASKED_SHARE) ** rng.random()
    asked = max(1, round(share * length / _TOKENS_PER_QUESTION))
    draw = _needles if rng.random() < 0.5 else _many_documents
    world, documents = draw(writer, seed, length - asked * _TOKENS_PER_QUESTION, asked, rng)
    questions = _turns(world, stage, asked, rng)
    # more documents have no numbers of their own (`data.TEXT`)
    independent = len(documents) < TEXT and rng.random() < stage.independent
    form = Form(rng.random() < stage.run_on, foretold=stage.foretold)
    return writer.write(documents, questions, True, system_prompt(world, rng), independent, form)


def _turns(world: World, stage: Stage, asked: int, rng: random.Random) -> list[Question]:
    """Questions one by one and roll-calls, in random order, about `asked` answers together."""
    turns: list[Question] = []
    while asked > 0:
        if rng.random() < 0.3 and (call := roll_call_about(world, rng)):
            asked -= call[0].answer.count("\n") + 1
            turns += call
        else:
            wanted = rng.randint(1, 12)
            asked -= wanted
            made = questions_about(world, stage, rng, wanted)
            found = "needle" if len(world.documents) == 1 else "lookup"
            turns += [replace(q, task=found) if q.task == "lookup" else q for q in made]
    # one question a fact, or its answer would be copied from the one before
    once = {turn.text if turn.task in ("unanswerable", "roll-call") else turn.answer: turn
            for turn in turns}  # fmt: skip
    return list(once.values())


def _needles(
    writer: SampleWriter, seed: int, length: int, asked: int, rng: random.Random
) -> tuple[World, tuple[WorldDocument, ...]]:
    """Few facts, anywhere in idle talk; those of the world's own documents are not shown."""
    fewest = 1.0 if rng.random() < 0.4 else max(1.0, asked / 6)
    count = max(1, round(math.exp(rng.uniform(math.log(fewest), math.log(2 * asked)))))
    config = WorldConfig(1, (count, count), (0, 0), marks=(0, 0))
    world = make_world(TRAINING_SEEDS_START + seed, config)
    sentences = [p.fact.state(rng.choice(p.fact.relation.statements)) for p in world.facts]
    length -= sum(len(writer.encode(sentence)) for sentence in sentences)
    hay: list[str] = []
    while length > 0:
        hay.append(world.filler.idle())
        length -= len(writer.encode(hay[-1]))
    for sentence in sentences:
        hay.insert(rng.randint(0, len(hay)), sentence)
    page = _PAGE if rng.random() < 0.5 else rng.randint(4, 60)
    starts = range(0, len(hay), page)
    return world, tuple(WorldDocument(" ".join(hay[s : s + page])) for s in starts)


def _many_documents(
    writer: SampleWriter, seed: int, length: int, asked: int, rng: random.Random
) -> tuple[World, tuple[WorldDocument, ...]]:
    """A world of as many documents as make up the length, half of them as roll-calls have it."""
    config = WorldConfig(1, (3, 6), (1, 3), marks=(0, 1))
    if rng.random() < 0.5:
        config = WorldConfig(
            1, (1, rng.randint(2, 9)), (0, rng.randint(1, 6)), marks=(0, 2),
            look_alikes=0.3, shown=0.25, max_hops=4,
        )  # fmt: skip
    facts = sum(config.facts) / 2 * (1 + config.look_alikes)
    sentences = 1 + facts + sum(config.fillers) / 2 + sum(config.marks) / 2
    documents = max(2, round(length / (_TOKENS_PER_SENTENCE * sentences)))
    hops = rng.randint(0, min(config.max_hops, documents - 1))
    config = replace(config, num_documents=documents, hops=hops)
    world = make_world(TRAINING_SEEDS_START + seed, config)
    return world, world.documents
