"""Draws the pictures of docs/claims.md and of the pages on reading and revising from ``results/``.

    python tools/draw_claims.py
    python tools/draw_claims.py gpu-report

Folders that are named hold rows of ``make gpu-report``: they are added to the files of the same
names first. Pictures of docs/images that `looseleaf eval report` does not draw stay as they are; of
those that it draws and no page shows, none is added."""

import csv
import shutil
import sys
import tempfile
from pathlib import Path

from looseleaf_lab.bench.results import append_rows
from looseleaf_lab.evals.report import write_report
from looseleaf_lab.evals.report.rows import ORIGIN

ROOT = Path(__file__).resolve().parents[1]
ROLL_CALL = "causal_roll-call_40_lines_50_documents"
NAMES = {
    f"exposure_{ROLL_CALL}": "exposure-roll-call",
    f"revise_{ROLL_CALL}": "revise-roll-call",
    f"select_{ROLL_CALL}": "select-roll-call",
    "select_nvidia_h200_token_llama-3.1-8b_quest_tokens_2048_batch": "select_batch_nvidia_h200",
    "select_nvidia_h200_token_llama-3.1-8b_quest_tokens_2048_context": "select_token_nvidia_h200",
    "lengths_causal_needle_8_needles": "needle-lengths",
}
"""What a page calls a picture whose own name is long."""


def add_rows(folder: Path, results: Path) -> list[Path]:
    """Append the rows of every file in ``folder`` to that of the same name in ``results``; returns
    the files of ``results``. Raises InvalidOption if one has other columns."""
    written = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            origin = {name: row.pop(name) for name in ORIGIN}
            append_rows(results / path.name, [row], origin)
        written.append(results / path.name)
    return written


def draw(results: Path, images: Path) -> list[Path]:
    """Draw again those pictures of ``images`` that the report draws; returns them."""
    drawn = []
    with tempfile.TemporaryDirectory() as scratch:
        for path in write_report(results, Path(scratch)):
            target = images / f"{NAMES.get(path.stem, path.stem)}{path.suffix}"
            if target.is_file():
                shutil.copyfile(path, target)
                drawn.append(target)
    return drawn


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for added in add_rows(Path(name), ROOT / "results"):
            print(added)
    for picture in draw(ROOT / "results", ROOT / "docs" / "images"):
        print(picture)
