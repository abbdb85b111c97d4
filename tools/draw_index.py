"""Draws docs/images/index.png from results/index.csv: recall against the keys compared.

python tools/draw_index.py"""

import csv
from pathlib import Path

from looseleaf_lab.bench.index_plot import draw

ROOT = Path(__file__).parent.parent


def newest(path: Path) -> list[dict[str, str]]:
    """The last row of each layer, size, index and effort; "chosen" indexes share one row."""
    rows = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            chosen = row["index"].startswith("chosen")
            name = ("chosen",) if chosen else (row["index"], row["effort"])
            rows[row["layer"], row["keys"], *name] = row
    return list(rows.values())


if __name__ == "__main__":
    draw(newest(ROOT / "results" / "index.csv"), ROOT / "docs" / "images" / "index.png")
