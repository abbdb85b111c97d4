"""RULER's types: what is asked stands in the text, nothing else does, and the length is kept."""

import re
from collections import Counter

import pytest

from looseleaf_lab.evals.ruler import KINDS, RulerTask
from looseleaf_lab.evals.ruler.kinds import frequent_words
from looseleaf_lab.evals.world import count_words

TOKENS = 1200
NEEDLE = re.compile(r"One of the special (?:number|identifier)s for (.*?) is ([\w-]+)\.")


def _length(item) -> int:
    return count_words("\n".join((item.before, *item.documents, item.question)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_as_long_as_asked_and_its_answers_score(kind: str) -> None:
    task = RulerTask(kind, TOKENS)
    items = task.items(range(3))
    for item in items:
        assert 0.85 * TOKENS <= _length(item) <= TOKENS
        text = "\n".join(item.documents)
        assert all(answer in text for answer in item.answers)
        assert task.score(item, ", ".join(item.answers).upper()) == {"found": 1.0}
        assert task.score(item, "I do not know.") == {"found": 0.0}
    assert len({item.fingerprint() for item in items}) == 3
    assert task.items(range(3)) == items


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("niah")])
def test_the_needles_of_the_asked_keys_are_the_answers_and_no_others(kind: str) -> None:
    (item,) = RulerTask(kind, TOKENS).items(range(1))
    needles = NEEDLE.findall("\n".join(item.documents))
    asked = [value for key, value in needles if key in item.question]
    assert sorted(asked) == sorted(item.answers)
    others = {"niah-multikey-1": 3}.get(kind, 0)
    if kind in ("niah-multikey-2", "niah-multikey-3"):
        assert len(needles) > 8
    else:
        assert len(needles) - len(asked) == others
    expected = {"niah-multivalue": 4, "niah-multiquery": 4}.get(kind, 1)
    assert len(item.answers) == expected
    assert ("identifiers" in item.question) == kind.endswith("-3")


def test_part_of_the_answers_scores_as_a_part() -> None:
    task = RulerTask("niah-multiquery", TOKENS)
    (item,) = task.items(range(1))
    assert task.score(item, item.answers[2]) == {"found": 0.25}


def test_variables_are_handed_on_from_the_value_in_order() -> None:
    (item,) = RulerTask("vt", TOKENS).items(range(1))
    assigned = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", "\n".join(item.documents))
    value = assigned[0][1]
    assert value.isdigit() and value in item.question
    for (_, source), (name, _) in zip(assigned[1:], assigned, strict=False):
        assert source == name
    assert [name for name, _ in assigned] == list(item.answers)


@pytest.mark.parametrize("tokens", [TOKENS, 4096])
def test_common_words_are_the_ten_most_common(tokens: int) -> None:
    (item,) = RulerTask("cwe", tokens).items(range(1))
    listed = re.findall(r"\d+\. (\S+)", "\n".join(item.documents))
    counts = Counter(listed).most_common()
    assert {word for word, _ in counts[:10]} == set(item.answers)
    assert counts[9][1] >= 3 * counts[10][1]


def test_frequent_words_are_the_three_most_frequent_without_a_tie() -> None:
    for units in (1, 20, 60, 500, 8000):
        prompt = frequent_words(0, units)
        counts = Counter(" ".join(prompt.documents).split()).most_common()
        assert {word for word, _ in counts[:3]} == set(prompt.answers)
        assert counts[2][1] > counts[3][1]


def test_questions_have_their_answer_in_one_document_or_cross_two() -> None:
    (one,) = RulerTask("qa-1", TOKENS).items(range(1))
    assert len(one.documents) > 5
    (two,) = RulerTask("qa-2", TOKENS).items(range(1))
    assert " the " in two.question


def test_a_prompt_that_cannot_be_so_short_is_refused() -> None:
    with pytest.raises(ValueError, match="cwe does not fit into 50 tokens: use a longer prompt"):
        RulerTask("cwe", 50).items(range(1))
