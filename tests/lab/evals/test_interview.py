"""Interview: one output, many questions, and a score that looks at each answer alone."""

from collections.abc import Iterator

import pytest
import torch

from looseleaf import LLM, Select
from looseleaf.config import Revise
from looseleaf_lab.evals.arms import EngineArm, EvictingArm, report_reading
from looseleaf_lab.evals.interview import ASSISTANT, USER, Interview


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on a busy machine spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def said(item, wrong=()):  # type: ignore[no-untyped-def]
    answers = ["Nothing." if n in wrong else a for n, a in enumerate(item.answers)]
    later = (f"{USER}{q}{ASSISTANT} {a}" for q, a in zip(item.turns, answers[1:], strict=True))
    return answers[0] + "".join(later)


def test_the_same_seed_gives_the_same_item_and_no_question_twice() -> None:
    task = Interview(questions=12, documents=4)
    (one,), (other,) = task.items(range(3, 4)), task.items(range(3, 4))
    assert one == other
    assert len({one.question, *one.turns}) == len(one.answers) == 12


def test_each_answer_is_scored_by_itself() -> None:
    (item,) = Interview(questions=12, documents=4).items(range(1))
    task = Interview(questions=12, documents=4)
    assert set(task.score(item, said(item)).values()) == {1.0}
    scores = task.score(item, said(item, wrong=(0, 11)))
    assert scores == {
        "exact": 10 / 12,
        "exact_first_third": 3 / 4,
        "exact_last_third": 3 / 4,
    }
    assert task.score(item, said(item)[:-200])["exact"] < 1.0


def test_a_world_with_too_few_facts_is_refused() -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        Interview(questions=500, documents=1).items(range(1))


@pytest.mark.parametrize("revised", [False, True])
def test_the_model_answers_and_the_grammar_asks(revised: bool) -> None:
    task = Interview(questions=4, documents=2)
    policies = {"select": Select("quest", ratio=0.5), "revise": Revise(2)} if revised else {}
    (item,) = task.items(range(1))
    llm = LLM(device="cpu", num_pages=100)
    arm = EngineArm(llm, "full", "prompt", report=report_reading, **policies)
    (answer,) = arm.answer([item])
    asked = [turn.split(ASSISTANT)[0] for turn in answer.text.split(USER)[1:]]
    assert asked == list(item.turns)
    assert task.score(item, answer.text)["exact"] == 1.0
    assert ("exposure_7" in answer.report) == revised


def test_what_throws_keys_away_reads_the_same_prompt() -> None:
    task = Interview(questions=3, documents=2)
    (item,) = task.items(range(1))
    llm = LLM(device="cpu", num_pages=100)
    full = EngineArm(llm, "full", "prompt").answer([item])
    kept = EvictingArm(llm, "tova", 2000).answer([item])
    assert kept[0].text == full[0].text
    gone = EvictingArm(llm, "tova", 0.02).answer([item])
    assert gone[0].text != full[0].text
    # a fraction is a share, also of everything
    named = [EvictingArm(llm, "tova", budget).name for budget in (0.5, 1.0, 1)]
    assert named == ["tova, ratio 0.5", "tova, ratio 1", "tova, tokens 1"]


def test_a_share_that_is_kept_is_of_the_context_in_the_middle_of_an_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (item,) = Interview(questions=3, documents=2).items(range(1))
    llm = LLM(device="cpu", num_pages=100)
    chosen = []
    generate = llm.generate
    monkeypatch.setattr(
        llm, "generate", lambda *a, select, **k: chosen.append(select.tokens) or generate(*a, **k)
    )
    (answer,) = EvictingArm(llm, "snapkv", 0.5).answer([item])
    encode = llm.engine.tokenizer.encode
    prompt = len(encode("".join([*item.documents, item.question])))
    assert chosen[0] == pytest.approx((prompt + len(encode(answer.text)) / 2) / 2, rel=0.05)
