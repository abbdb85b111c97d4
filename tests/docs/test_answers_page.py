"""The board of answers on real text is what the rows of results say."""

from pathlib import Path

from tools.draw_answers import BOARD, PAGE, board, family_of

ROOT = Path(__file__).parents[2]


def test_the_board_is_that_of_the_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = board(ROOT / "results" / "answers.csv")
    assert BOARD.search(page), "the page has the marks of its board"
    assert table in page, "draw it anew: python -m tools.draw_answers"


def test_a_line_joins_the_shares_of_one_policy() -> None:
    names = ("deviation, layer 2, 0.15", "question, 0.3", "full", "ceiling read, 0.05")
    families = [family_of(name) for name in names]
    assert families == ["deviation, layer 2", "question", "full", "ceiling read"]
