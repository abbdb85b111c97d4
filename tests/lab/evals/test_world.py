"""The generated world: its seeds, its facts, its questions."""

import random
import re

import pytest

from looseleaf_lab.evals.world import (
    NO_ANSWER,
    TASKS,
    TRAINING_SEEDS_START,
    World,
    WorldConfig,
    ask,
    is_correct,
    make_example,
    make_world,
    words,
)
from looseleaf_lab.evals.world.names import fresh_name, is_held_out, name_pool

SEEDS = range(25)


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return [make_world(seed) for seed in SEEDS]


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_always_gives_the_same_example(task: str) -> None:
    assert make_example(task, 3) == make_example(task, 3)
    assert make_example(task, 3) != make_example(task, 4)


def test_no_made_up_name_of_an_evaluated_world_is_ever_trained_on() -> None:
    assert not set(name_pool(True)) & set(name_pool(False))
    rng = random.Random(0)
    assert not any(is_held_out(fresh_name(rng)) for _ in range(500))
    known = {*words.FIRST_NAMES}
    held_out = {name for seed in SEEDS for name in _names(make_world(seed))} - known
    trained = {n for seed in SEEDS for n in _names(make_world(TRAINING_SEEDS_START + seed))} - known
    assert held_out and all(is_held_out(name) for name in held_out)
    assert trained and not any(is_held_out(name) for name in trained)


def _names(world: World) -> set[str]:
    return {name for person in world.drawer.people for name in person.split(" ")}


def test_a_world_says_only_one_thing_of_every_subject(worlds: list[World]) -> None:
    for world in worlds:
        keys = [placed.fact.key for placed in world.facts + world.marks]
        assert len(keys) == len(set(keys))


def test_every_fact_stands_in_its_document(worlds: list[World]) -> None:
    for world in worlds:
        for placed in world.facts:
            text = world.documents[placed.document].text.lower()
            assert placed.fact.value.lower() in text
            assert placed.fact.slots["s"].lower() in text


def test_the_two_facts_of_a_bridge_stand_in_two_documents(worlds: list[World]) -> None:
    bridges = [bridge for world in worlds for bridge in world.bridges]
    assert bridges
    for first, second in bridges:
        assert first.document != second.document
        assert first.fact.value == second.fact.slots["s"]


def test_what_is_inherited_is_said_in_an_earlier_document_only(worlds: list[World]) -> None:
    for world in worlds:
        subjects = {mark.fact.slots["s"]: mark for mark in world.marks}
        for number, document in enumerate(world.documents):
            for offset, value in document.inherited:
                assert document.text[offset:].startswith(f" {words.NEUTRAL}.")
                sentence = re.split(r"[.?!:\n]\s", document.text[:offset])[-1]
                inside = sorted(
                    (mark for name, mark in subjects.items() if name in sentence),
                    key=lambda mark: mark.document,
                )
                assert [mark.fact.value for mark in inside] == [value, value]
                assert inside[0].document < inside[1].document == number
                assert inside[1].hops == inside[0].hops + 1


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_a_chain_has_as_many_hops_as_asked(hops: int) -> None:
    for seed in SEEDS:
        example = make_example("chain", seed, hops=hops)
        assert (example.task, example.hops, len(example.documents)) == ("chain", hops, 6)
        assert example.answer.split()[-1].rstrip(".") in words.MARKS


def test_roots_of_chains_are_many_enough_that_guessing_does_not_help() -> None:
    shares = []
    for seed in SEEDS:
        world = make_world(seed, WorldConfig(hops=3))
        shares.append(1 / sum(mark.hops == 0 for mark in world.marks))
        assert len({mark.fact.slots["k"] for mark in world.marks}) == 1
    assert sum(shares) / len(shares) < 0.3


def test_what_no_document_says_is_answered_by_saying_so() -> None:
    for seed in SEEDS:
        example = make_example("unanswerable", seed)
        assert example.answer == NO_ANSWER
        answers = {placed.fact.answer() for placed in make_world(seed).facts}
        assert NO_ANSWER not in answers


def test_training_worlds_name_some_inherited_values_openly() -> None:
    config = WorldConfig(hops=3, shown=1.0)
    shown = [
        document.text[offset + 1 :].startswith(value)
        for seed in SEEDS
        for document in make_world(TRAINING_SEEDS_START + seed, config).documents
        for offset, value in document.inherited
    ]
    assert any(shown)


def test_only_the_answer_is_correct() -> None:
    example = make_example("lookup", 1)
    assert is_correct(example.answer, f"  {example.answer}\n")
    assert not is_correct(example.answer, example.answer + " And more.")
    assert not is_correct(example.answer, "")


def test_what_cannot_be_asked_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="unknown task 'riddle'"):
        make_example("riddle", 0)
    with pytest.raises(ValueError, match="hops belong to the task chain"):
        make_example("lookup", 0, hops=1)
    with pytest.raises(ValueError, match="needs 4 documents"):
        make_example("chain", 0, num_documents=3, hops=3)


def test_a_world_of_one_document_has_questions_too() -> None:
    world = make_world(5, WorldConfig(num_documents=1))
    assert ask(world, "lookup", random.Random(0)) is not None
    assert ask(world, "chain", random.Random(0)) is None
