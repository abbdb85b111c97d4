"""The board of answers on real text is what the rows of results say."""

from pathlib import Path

from tools.draw_answers import MARKS, PAGE, TABLES, family_of, filled

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [mark[2] for mark in MARKS.finditer(page)] == list(TABLES)
    drawn = filled(page, ROOT / "results" / "answers.csv")
    assert drawn == page, "draw it anew: python -m tools.draw_answers"


def test_a_line_joins_the_shares_of_one_policy() -> None:
    names = ("deviation, layer 2, 0.15", "question, 0.3", "full", "ceiling read, 0.05")
    families = [family_of(name) for name in names]
    assert families == ["deviation, layer 2", "question", "full", "ceiling read"]
