"""Roll-call: one output, many questions, and a score that looks at each answer alone."""

import pytest

from looseleaf import LLM
from looseleaf.evals.roll_call import ASSISTANT, USER, RollCall, RollCallArm


def said(item, wrong=()):  # type: ignore[no-untyped-def]
    lines = item.question.split("\n")
    answers = ["Nothing." if n in wrong else a for n, a in enumerate(item.answers)]
    later = (f"{USER}{q}{ASSISTANT} {a}" for q, a in zip(lines[1:], answers[1:], strict=True))
    return answers[0] + "".join(later)


def test_the_same_seed_gives_the_same_item_and_no_question_twice() -> None:
    task = RollCall(questions=12, documents=4)
    (one,), (other,) = task.items(range(3, 4)), task.items(range(3, 4))
    assert one == other
    assert len(set(one.question.split("\n"))) == len(one.answers) == 12


def test_each_answer_is_scored_by_itself() -> None:
    (item,) = RollCall(questions=12, documents=4).items(range(1))
    task = RollCall(questions=12, documents=4)
    assert set(task.score(item, said(item)).values()) == {1.0}
    scores = task.score(item, said(item, wrong=(0, 11)))
    assert scores == {
        "exact": 10 / 12,
        "exact_first_third": 3 / 4,
        "exact_last_third": 3 / 4,
    }
    assert task.score(item, said(item)[:-200])["exact"] < 1.0


def test_a_world_with_too_few_facts_is_refused() -> None:
    with pytest.raises(ValueError, match="ask less"):
        RollCall(questions=500, documents=1).items(range(1))


def test_the_model_answers_and_the_grammar_asks() -> None:
    task = RollCall(questions=6, documents=2)
    items = task.items(range(2))
    answers = RollCallArm(LLM(device="cpu", num_pages=200), "full", "prompt").answer(items)
    for item, answer in zip(items, answers, strict=True):
        turns = answer.text.split(USER)[1:]
        asked = [turn.split(ASSISTANT)[0] for turn in turns]
        assert asked == item.question.split("\n")[1:]
        assert task.score(item, answer.text)["exact"] >= 5 / 6
