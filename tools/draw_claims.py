"""Draws the pictures of docs/claims.md, docs/select.md and docs/revise.md from ``results/``.

    python tools/draw_claims.py
    python tools/draw_claims.py gpu-report

Arguments are folders with rows of ``make gpu-report``, which are first appended to ``results/``.
Only existing pictures of docs/images that `looseleaf eval report` draws are replaced."""

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
"""Names of pictures in docs/images, by the report's long names."""


def add_rows(folder: Path, results: Path) -> list[Path]:
    """Append the rows of each file in ``folder`` to the file of the same name in ``results``.

    Returns the files in ``results``. Raises InvalidOption for other columns."""
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
    """Replace the pictures of ``images`` that the report draws; returns their paths."""
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
