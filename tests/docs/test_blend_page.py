"""The tables of quality on the page of blending are what the rows of results say."""

from pathlib import Path

import pytest

from tools.draw_blend import RATIOS, SELECTORS, SETTINGS, Rows, arm_of, tables

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "blend.md").read_text(encoding="utf-8")
TABLES = tables(ROOT / "results")


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_page_is_that_of_the_rows(name: str) -> None:
    assert TABLES[name] in PAGE, f"print it anew by tools/draw_blend.py: {name}"


def test_lookup_is_whole_under_every_selector_as_the_page_says() -> None:
    rows = Rows.read(ROOT / "results" / "blend.csv")
    for name in SELECTORS:
        for ratio in RATIOS:
            assert rows.mean("lookup", SETTINGS["lookup"], arm_of(name, ratio)) in (None, 100.0)


def test_every_selector_was_measured_at_every_ratio_where_documents_depend_on_each_other() -> None:
    assert "not run" not in TABLES["chain"]
