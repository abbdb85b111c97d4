"""Roll-call, needle, look-alikes, deep chains: what they promise, and that nothing older moved."""

import hashlib
import re

import pytest

from looseleaf.llm.load import reference_model
from looseleaf.models import Tokenizer
from looseleaf_lab.evals.world import (
    MAX_HOPS,
    WorldConfig,
    count_words,
    lines_right,
    make_deep_chain,
    make_example,
    make_look_alike,
    make_lookups,
    make_needle,
    make_needles,
    make_roll_call,
    make_world,
    numbered_lines,
    words,
)
from looseleaf_lab.evals.world_tasks import LookupsTask, NeedleTask, RollCallTask, WorldTask

SEEDS = range(12)


def test_examples_are_those_that_the_published_figures_were_measured_on() -> None:
    digest = hashlib.blake2b(digest_size=8)
    tasks = [("lookup", None), ("bridge", None), ("unanswerable", None)]
    for task, hops in [*tasks, ("chain", 1), ("chain", 2), ("chain", 3)]:
        for seed in range(10):
            digest.update(repr(make_example(task, seed, hops=hops)).encode())
    assert digest.hexdigest() == "9364338ecafecdbb"


def test_a_roll_call_is_long_enough_to_be_one() -> None:
    tokenizer = Tokenizer(reference_model())
    for seed in range(4):
        roll_call = make_roll_call(seed)
        assert len(roll_call.lines) == 40
        assert sum(len(tokenizer.encode(d)) for d in roll_call.documents) >= 4000
        assert len(tokenizer.encode(roll_call.answer)) >= 600


def test_every_line_of_a_roll_call_is_said_by_the_documents_and_asked_once() -> None:
    for seed in SEEDS:
        roll_call = make_roll_call(seed, 10, 8)
        asked = re.findall(r"^\d+\. (.*)$", roll_call.question, re.MULTILINE)
        assert len(set(asked)) == len(set(roll_call.lines)) == 10
        text = " ".join(roll_call.documents).lower()
        for line in roll_call.lines:
            assert line.rstrip(".").split()[-1].lower() in text
        assert make_roll_call(seed, 10, 8) == roll_call != make_roll_call(seed + 1, 10, 8)


def test_lines_count_by_their_number_and_the_first_of_a_number_counts() -> None:
    roll_call = make_roll_call(0, 4, 4)
    one, two, three, four = roll_call.lines
    assert all(lines_right(roll_call.lines, roll_call.answer))
    assert lines_right(roll_call.lines, f"2. {two}\n1)  {one}\n4. {one}\n4. {four}") == [
        True,
        True,
        False,
        False,
    ]
    assert lines_right(roll_call.lines, f"{one}\n{two}\n{three}") == [False] * 4
    assert numbered_lines("1. a\nb\n 2) c \n1. d") == {1: "a", 2: "c"}


def test_scores_of_a_roll_call_are_shares_of_its_lines() -> None:
    task = RollCallTask(4, 4)
    (item,) = task.items(range(1))
    right = f"1. {item.answers[0]}\n2. wrong\n9. nothing"
    assert task.score(item, right) == {
        "lines": 0.25,
        "lines_given": 0.5,
        "lines_first_third": 1.0,
        "lines_last_third": 0.0,
    }
    assert set(task.score(item, "").values()) == {0.0}
    assert item.max_tokens >= 4 * 20


@pytest.mark.parametrize("length", [100, 1000, 5000])
def test_a_needle_lies_as_deep_as_asked_in_a_context_as_long_as_asked(length: int) -> None:
    for depth in (0.0, 0.5, 1.0):
        example = make_needle(3, length, depth)
        text = " ".join(example.documents)
        assert length <= count_words(text) <= length + 40
        value = example.answer.rstrip(".").split()[-1]
        found = text.index(value) / len(text)
        assert text.count(value) == 1
        assert abs(found - depth) < 0.1 + 60 / length


def test_eleven_needles_in_a_row_cover_all_depths() -> None:
    task = NeedleTask(600)
    places = []
    for item in task.items(range(11)):
        sentences = " ".join(item.documents).split(". ")
        answer = set(re.findall(r"\w+", item.answers[0]))
        shared = [len(answer & set(re.findall(r"\w+", one))) for one in sentences]
        places.append(shared.index(max(shared)) / len(sentences))
    assert places == sorted(places)
    assert places[0] < 0.1 and places[-1] > 0.9


def test_a_look_alike_shares_all_but_a_word_and_the_value() -> None:
    config = WorldConfig(look_alikes=0.5)
    kinds = set()
    for seed in SEEDS:
        world = make_world(seed, config)
        assert world.look_alikes
        keys = [placed.fact.key for placed in world.facts]
        assert len(keys) == len(set(keys))
        for fact, other in ((one.fact, two.fact) for one, two in world.look_alikes):
            assert fact.relation is other.relation and fact.value != other.value
            assert fact.slots != other.slots
            mine, theirs = (
                " ".join(f.slots[s] for s in sorted(f.slots)).split() for f in (fact, other)
            )
            # a verb comes with its participle, a subject may lose or gain its first word
            assert len(set(mine) ^ set(theirs)) <= 4
            assert set(mine) & set(theirs)
            kinds.add(fact.relation.name)
    assert len(kinds) >= 6


def test_a_world_may_have_more_documents_than_there_are_marks() -> None:
    world = make_world(0, WorldConfig(num_documents=60))
    roots = [mark.fact.value for mark in world.marks if mark.hops == 0]
    assert len(roots) == len(set(roots)) <= len(words.MARKS) < len(world.marks)


def test_without_look_alikes_a_world_has_none() -> None:
    assert make_world(0).look_alikes == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_deep_chain_goes_through_five_documents(seed: int) -> None:
    example = make_deep_chain(seed)
    assert (example.task, example.hops) == ("chain", 4) and example.hops > MAX_HOPS
    value = example.answer.rstrip(".").split()[-1]
    assert value in words.MARKS
    # the value itself is named once, four documents before the end of the chain
    naming = [n for n, d in enumerate(example.documents) if re.search(rf"\b{value}\b", d)]
    subject = example.answer.split(" of ")[1].split(" is ")[0]
    asked = [n for n, d in enumerate(example.documents) if subject in d]
    assert max(asked) - min(naming) >= 4


def test_settings_and_answers_of_the_new_tasks() -> None:
    deep = WorldTask("chain", hops=4)
    (item,) = deep.items(range(1))
    assert deep.setting == "4 hops, 6 documents"
    assert deep.score(item, item.answers[0] + "\n") == {"exact": 1.0}
    near = WorldTask("look-alike")
    assert near.items(range(2)) == near.items(range(2))
    assert make_look_alike(1) != make_look_alike(2)


def test_what_cannot_be_made_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="has 400 facts: ask for fewer"):
        make_roll_call(0, 400, 4)
    with pytest.raises(ValueError, match="at least one line"):
        make_roll_call(0, 0)
    with pytest.raises(ValueError, match="at least one token"):
        make_needle(0, 0)
    with pytest.raises(ValueError, match="depth is from 0 to 1"):
        make_needle(0, 10, 2.0)
    with pytest.raises(ValueError, match="needs 5 documents"):
        make_deep_chain(0, num_documents=4)


def test_several_needles_share_a_context_and_each_has_a_question_of_its_own() -> None:
    task = NeedleTask(600, needles=5)
    items = task.items(range(3, 12))
    assert [item.key for item in items] == [str(seed) for seed in range(3, 12)]
    contexts = [item.documents for item in items]
    assert len(set(contexts[:2])) == len(set(contexts[2:7])) == 1 and len(set(contexts)) == 3
    assert len({item.question for item in items[2:7]}) == 5
    (text,) = {" ".join(context) for context in contexts[2:7]}
    places = [
        text.lower().index(item.answers[0].split()[-1].rstrip(".").lower()) for item in items[2:7]
    ]
    assert places == sorted(places)
    assert places[0] < len(text) / 20 and places[-1] > len(text) * 19 / 20
    assert abs(count_words(text) - 600) < 40
    with pytest.raises(ValueError, match="ask for fewer"):
        make_needles(0, 60, 20)


def test_several_lookups_share_a_world_and_each_asks_for_a_fact_of_its_own() -> None:
    task = LookupsTask(documents=3, per_world=4)
    items = task.items(range(8))
    assert len({item.documents for item in items[:4]}) == 1
    assert items[3].documents != items[4].documents
    assert len({item.question for item in items[:4]}) == 4
    for item in items:
        assert task.score(item, item.answers[0]) == {"exact": 1.0}
        assert task.score(item, items[0].answers[0])["exact"] == float(item is items[0])
    assert task.items(range(2, 5)) == items[2:5]


def test_a_world_of_fewer_facts_than_lookups_is_refused() -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        make_lookups(0, 100, 2)
