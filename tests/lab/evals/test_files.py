"""Files in the two public shapes, metrics, several questions in one output, and the model card."""

import json
from pathlib import Path

import pytest

from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.evals.evaluate_more import _CARD_TASKS, _LONG_TASKS, _make_tasks
from looseleaf_lab.evals import scores
from looseleaf_lab.evals.card import compare, read_card
from looseleaf_lab.evals.figures import Figure
from looseleaf_lab.evals.files import FileOptions, read_task, split
from looseleaf_lab.evals.joined import Joined
from tests.lab.evals.conftest import Sums

BLEND = [
    {
        "question": "Who built the mill?",
        "answers": ["Dana Veel", "D. Veel"],
        "ctxs": [{"title": "Mill", "text": "Dana Veel built it."}, {"title": "", "text": "Rain."}],
    }
]
LONG = [
    {"input": "Who?", "context": "Passage 1:\nA b.\n\nPassage 2:\nC d.", "answers": ["Dana"]},
    {"input": "", "context": "one two\nthree four\nfive", "answers": ["one three"], "length": 5},
]


def _file(folder: Path, name: str, entries: object, lines: bool = False) -> Path:
    path = folder / name
    whole = "\n".join(json.dumps(one) for one in entries) if lines else json.dumps(entries)
    path.write_text(whole, encoding="utf-8")
    return path


def test_a_cacheblend_file_has_a_document_for_each_context(tmp_path: Path) -> None:
    task = read_task(_file(tmp_path, "musique.json", BLEND), FileOptions())
    (item,) = task.items(range(10))
    assert (task.name, task.setting) == ("file musique", "2 documents")
    assert item.documents == ("Mill\n\nDana Veel built it.", "Rain.")
    assert item.question == "Who built the mill?" and "few words" in item.before
    assert task.score(item, "D Veel.") == {"f1": 1.0, "exact": 1.0, "contains": 1.0}
    partly = task.score(item, "It was Dana")
    assert partly["f1"] == pytest.approx(2 * 1 / (3 + 2)) and partly["exact"] == 0.0


def test_a_longbench_file_is_cut_at_passages_or_paragraphs(tmp_path: Path) -> None:
    path = _file(tmp_path, "qmsum.jsonl", LONG, lines=True)
    task = read_task(path, FileOptions(("rouge-l",), page_words=4))
    first, second = task.items(range(2))
    assert first.documents == ("Passage 1:\nA b.", "Passage 2:\nC d.")
    assert second.documents == ("one two\nthree four", "five")
    # an entry without a question is asked for what the instruction says
    assert second.question == second.before == "Summarize the given text."
    assert task.score(second, "one two three")["rouge-l"] == pytest.approx(0.8)
    assert task.items(range(1, 5)) == (second,)


def test_lines_of_a_file_end_at_line_feeds_only(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    lines = [json.dumps({**one, "context": text}, ensure_ascii=False) for one in LONG]
    path = tmp_path / "separators.jsonl"
    path.write_text("\r\n".join(lines) + "\n", encoding="utf-8")
    assert [item.documents for item in read_task(path, FileOptions()).items(range(2))] == [
        (text,)
    ] * 2


def test_nothing_of_a_context_is_lost_by_cutting_it() -> None:
    text = "\n".join(f"paragraph {number} has words" for number in range(40))
    documents = split(text, 30)
    assert len(documents) == 5
    assert "\n".join(documents) == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("not json", "is no JSON"),
        ('[{"question": "a"}]', "entry 0 of .* has neither"),
        ("[3]", "entry 0 of .* has neither"),
        ("[]", "has no entries"),
        ("[" * 100_000, "is no JSON: it is nested too deep"),
        ('{"input": "a"}\n{oops', "line 2: .* a JSON list, or JSON lines"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidOption, match=reason):
        read_task(path, FileOptions())


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({**BLEND[0], "answers": []}, "entry 0 of .*: `answers` is \\[\\]"),
        ({**BLEND[0], "answers": [[]]}, "`answers`"),
        ({**BLEND[0], "answers": None}, "`answers` is None"),
        ({**BLEND[0], "answers": [None]}, "`answers`"),
        # SQuAD's shape, whose keys are no answers
        ({**BLEND[0], "answers": {"text": ["Dana"], "answer_start": [1]}}, "`answers`"),
        ({**BLEND[0], "question": None}, "`question` is None: give a text"),
        ({**BLEND[0], "ctxs": [{"text": None}]}, "text of `ctxs` is None: give a text"),
        ({**LONG[0], "input": ["Who?"]}, "`input` is .*: give a text"),
        ({**LONG[0], "context": None}, "`context` is None: give a text"),
    ],
)
def test_what_nothing_could_answer_rightly_is_refused_and_not_counted_as_wrong(
    tmp_path: Path, entry: object, reason: str
) -> None:
    with pytest.raises(InvalidOption, match=reason):
        read_task(_file(tmp_path, "x.json", [entry]), FileOptions())


def test_answers_may_be_numbers_or_lists_of_other_wordings(tmp_path: Path) -> None:
    # CacheBlend's own files have lists in the list
    for answers, right in (
        ([["Dana", "D. Veel"]], ("Dana", "D. Veel")),
        (7, ("7",)),
        ("a", ("a",)),
    ):
        task = read_task(
            _file(tmp_path, "x.json", [{**BLEND[0], "answers": answers}]), FileOptions()
        )
        assert task.items(range(1))[0].answers == right


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(BLEND), encoding="utf-8-sig")
    assert len(read_task(path, FileOptions()).entries) == 1


def test_what_is_not_there_or_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="can't be read"):
        read_task(tmp_path / "none.json", FileOptions())
    with pytest.raises(InvalidOption, match="unknown metric"):
        read_task(_file(tmp_path, "a.json", BLEND), FileOptions(("bleu",)))


@pytest.mark.parametrize(
    ("metric", "text", "answer", "score"),
    [
        (scores.exact, "The  Mill!", "mill", 1.0),
        (scores.exact, "mills", "mill", 0.0),
        (scores.contains, "It is 12, I think", "12", 1.0),
        (scores.contains, "It is 312", "12", 0.0),
        # letters of a choice: an article alone is no word, and not one that is in every text
        (scores.contains, "The answer is B", "A", 0.0),
        (scores.contains, "A.", "A", 1.0),
        (scores.word_f1, "", "mill", 0.0),
        (scores.word_f1, "the", "a", 1.0),
        (scores.word_f1, "red red mill", "red mill", 0.8),
        (scores.rouge_l, "running mills", "run mill", 1.0),
    ],
)
def test_metrics_on_known_pairs(metric, text: str, answer: str, score: float) -> None:
    assert metric(text, [answer]) == pytest.approx(score)
    assert metric(text, ["elsewhere entirely", answer]) == pytest.approx(score)


def test_joined_questions_are_scored_line_by_line() -> None:
    task = Joined(Sums(), 3)
    first, second = task.items(range(2))
    assert (task.name, task.setting) == ("sums, joined", "3 questions of one digit")
    assert first.documents == ("0", "1", "2") and second.documents == ("3", "4", "5")
    assert first.question.endswith("\n1. plus one?\n2. plus one?\n3. plus one?")
    assert first.max_tokens >= 3 * 96
    assert task.score(first, "1. 1\n2. 2\n3. 3")["exact"] == 1.0
    assert task.score(second, "1. 4\n3. 9")["exact"] == pytest.approx(1 / 3)


def test_the_same_document_of_several_questions_stands_once_and_the_rest_is_shorter(
    tmp_path: Path,
) -> None:
    inner = read_task(_file(tmp_path, "a.json", BLEND * 3), FileOptions())
    first, last = Joined(inner, 2).items(range(4))
    assert len(first.documents) == 2 and len(first.answers) == 2 and len(last.answers) == 1


def _figure(value: float, half: float) -> Figure:
    about = ("causal", "chain", "2 hops, 6 documents", "documents reused", "0-9", "exact", 10)
    return Figure(*about, value, value - half, value + half)


def test_the_card_is_read_whole_and_held_against_what_is_measured() -> None:
    published = read_card()
    assert len(published) == 29
    stated = published["causal", "chain", "2 hops, 6 documents", "documents reused"]
    assert published["block", "lookup", "6 documents", "full attention"] >= 0.98
    for task, setting in (
        ("chain", "4 hops, 6 documents"), ("roll-call", "40 lines, 50 documents"),
        ("needle", "16384 tokens"), ("needle", "16384 tokens, 8 needles"),
    ):  # fmt: skip
        assert published["causal", task, setting, "full attention"] >= 0.9
    lines, agree = compare([_figure(stated + 0.01, 0.02)], published)
    assert agree and f"card {stated:6.1%}" in lines[0]
    lines, agree = compare([_figure(stated + 0.1, 0.02)], published)
    assert not agree and "outside" in lines[0]


def test_all_that_the_card_states_is_asked_by_eval_all() -> None:
    made = _make_tasks(_CARD_TASKS, {}, len)
    for name, sizes, _ in _LONG_TASKS:
        made += _make_tasks((name,), sizes, len)
    stated = {(task, setting) for _, task, setting, _ in read_card()}
    assert {(task.name, task.setting) for task in made} == stated
