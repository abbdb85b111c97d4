"""Which rows the report takes, where several machines measured the same."""

from pathlib import Path

from looseleaf_lab.bench.results import append_rows
from looseleaf_lab.evals.report import speed, write_report
from looseleaf_lab.evals.report.rows import read_rows

ORIGIN = {
    "date": "2026-11-25", "commit": "abc", "python_version": "3", "torch_version": "2",
    "transformers_version": "5",
}  # fmt: skip


def test_a_pictures_times_are_of_its_machine_whatever_was_measured_elsewhere_since(
    tmp_path: Path,
) -> None:
    row = {
        "model": "m, random", "documents": 6, "document_tokens": 512, "question_tokens": 64,
        "measurement": "first token", "arm": "full", "place": "nowhere", "ratio": 0.0, "batch": 0,
    }  # fmt: skip
    for machine, ms in (("One card", 70.0), ("Another card", 90.0)):
        append_rows(tmp_path / "fuse.csv", [row | {"ms": ms}], {**ORIGIN, "hardware": machine})
    one, another = speed.fuse_charts(read_rows(tmp_path / "fuse.csv", per_machine=True))
    assert (one.name, one.series[0].y) == ("fuse_one_card_6_512", (70.0,))
    assert (another.name, another.series[0].y) == ("fuse_another_card_6_512", (90.0,))
    names = {path.name for path in write_report(tmp_path, tmp_path / "out")}
    assert {"fuse_one_card_6_512.svg", "fuse_another_card_6_512.svg"} <= names


def test_of_what_is_counted_the_newest_row_is_taken_whatever_machine_it_is_of(
    tmp_path: Path,
) -> None:
    for machine, hits in (("One machine", 0.5), ("Another machine", 0.6)):
        row = {"cache": "once", "reused": hits}
        append_rows(tmp_path / "hits.csv", [row], {**ORIGIN, "hardware": machine})
    assert [row["reused"] for row in read_rows(tmp_path / "hits.csv")] == ["0.6"]
