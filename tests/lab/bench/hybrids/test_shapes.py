"""Sizes of published hybrids: against their definitions, and as the page prints them."""

import re
from pathlib import Path

import pytest

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.hybrids import HybridsConfig, measure
from looseleaf_lab.bench.hybrids.shapes import SHAPES, HybridShape

QWEN, *_, GRANITE = SHAPES


def test_bytes_of_a_delta_rule() -> None:
    assert QWEN.state_bytes == 4 * 36 * 32 * 128 * 128
    assert QWEN.map_bytes == 2 * 36 * 32 * 2 * 128 * 128
    assert QWEN.token_bytes == 2 * 2 * 12 * 2 * 256
    assert QWEN.border_bytes == 2 * 36 * 6 * 8192


def test_bytes_of_mamba2() -> None:
    assert GRANITE.map_bytes == 2 * 36 * 128 * (64 * 128 + 1)
    assert GRANITE.border_bytes == 2 * 36 * 6 * (128 * 64 + 2 * 128)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_factors_and_dense_maps_weigh_the_same_at_the_border(
    shape: HybridShape,
) -> None:
    tokens = shape.factored_tokens
    assert tokens * shape.factor_bytes == pytest.approx(shape.map_bytes)


def test_the_pages_table_is_computed() -> None:
    page = (Path(__file__).parents[4] / "docs" / "hybrids.md").read_text("utf-8")
    for shape in SHAPES:
        row = re.search(rf"^\| {re.escape(shape.name)} \|(.*)\|$", page, re.MULTILINE)
        assert row is not None, shape.name
        printed = [cell.strip() for cell in row[1].split("|")]
        values = [value for value, _ in shape.figures().values()]
        assert printed == [f"{v:,.0f}" if v >= 100 else f"{v:.2g}" for v in values], shape.name


@pytest.mark.parametrize("field", ["parts", "families"])
def test_an_unknown_choice_is_refused(field: str) -> None:
    with pytest.raises(InvalidOption, match=f"unknown {field} .'stone'.: choose from"):
        HybridsConfig(**{field: ("stone",)})  # type: ignore[arg-type]


def test_each_part_yields_its_rows() -> None:
    config = HybridsConfig(
        documents=1, document_tokens=4, head_tokens=4, families=("granitemoehybrid",)
    )
    rows = [*measure(config)]
    assert {row["part"] for row in rows} == {"laws", "heads", "sizes"}
    assert len({tuple(row) for row in rows}) == 1
    composed = [r for r in rows if r["measurement"] == "composed state from its recurrence"]
    assert len(composed) == 2
    assert max(float(row["value"]) for row in composed) < 1e-5
