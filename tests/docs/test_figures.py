"""Figures that pages repeat are those of the newest rows in ``results/`` and of the model card."""

import re
from pathlib import Path

from tests.docs.test_claims_figures import CPU, ROOT, cell


def flat(*parts: str) -> str:
    return " ".join(Path(ROOT, *parts).read_text(encoding="utf-8").split())


def decoded(who: str, text: str) -> str:
    measurement = f"decode, batch 16, {text}"
    return f"{cell('generate', who, CPU, model='reference', measurement=measurement):,.0f}"


def test_what_grouping_gains_on_a_cpu_is_the_newest_row() -> None:
    shared, private = "documents", "private text"
    mine, other = "looseleaf", "transformers"
    assert (
        f"behind shared documents at {decoded(mine, shared)} tokens/s, 16 with private text at "
        f"{decoded(mine, private)}, Transformers {decoded(other, shared)} and "
        f"{decoded(other, private)}"
    ) in flat("docs", "grouping.md")


def test_what_frames_lose_is_what_the_model_card_says() -> None:
    card = flat("src", "looseleaf", "assets", "MODEL_CARD.md")
    found = re.search(r"\| lookup \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", card)
    assert found is not None
    whole, reused, block_whole, block_reused = found.groups()
    assert (
        f"lookups of `looseleaf-reference-causal` {reused} against {whole} %, of "
        f"`looseleaf-reference` {block_reused} and {block_whole}"
    ) in flat("docs", "frames.md")
