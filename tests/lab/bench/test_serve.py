"""``bench serve`` holds every answer against one alone, and reports no speed if one is wrong."""

from pathlib import Path

import pytest

from looseleaf.errors import LooseleafError
from looseleaf_lab.bench import serve
from looseleaf_lab.bench.serve import Load, make_questions, measure

TEXTS = [f"Mira Tolland signs travel requests. The archive is in wing {n}." for n in range(4)]
ASKED = ["Who signs travel requests?", "Where is the archive?"]
LOAD = Load(streams=4, seconds=2.0, documents=4, tenants=2, questions=6, leaving=0.3, max_tokens=12)


@pytest.fixture(autouse=True)
def found_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a process of its own, which must find the package as the tests do."""
    monkeypatch.setenv("PYTHONPATH", str(Path(serve.__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_questions_are_the_same_for_the_same_seed_and_differ_in_order() -> None:
    questions = make_questions(Load(questions=50), TEXTS, ASKED)
    assert questions == make_questions(Load(questions=50), TEXTS, ASKED)
    assert questions != make_questions(Load(questions=50, seed=1), TEXTS, ASKED)
    assert {len(question.texts) for question in questions} == {1, 2, 3, 4}
    assert len({question.texts for question in questions if len(question.texts) == 2}) > 2


def test_a_short_run_has_right_answers_and_loses_no_page() -> None:
    row = measure(LOAD, TEXTS, ASKED)
    assert row["wrong"] == row["lost_pages"] == 0
    assert int(row["finished"]) > 0
    assert 0 < float(row["first_token_p50_ms"]) <= float(row["first_token_p99_ms"])
    assert float(row["tokens_per_s"]) > 0


def test_a_wrong_answer_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "answers_alone", lambda questions, load: ["?"] * len(questions))
    with pytest.raises(LooseleafError, match="wrong answers"):
        measure(LOAD, TEXTS, ASKED)
