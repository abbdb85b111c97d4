"""``looseleaf calibrate`` says what is missing, and nothing about what is there."""

from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.mark.parametrize(
    ("num_documents", "arguments", "sentence"),
    [
        (4, [], "give a question with -q, or a file of them with --questions"),
        (1, ["-q", "Who?"], "give two documents or more with -d, not 1"),
        (2, ["-q", "Who?", "--ratio", 15], "--ratio must be above 0 and at most 1, not 15"),
        (2, ["-q", "Who?", "--tolerance", 2], "--tolerance must be from 0 to below 1, not 2"),
    ],
)
def test_the_missing_part_is_named(
    run: Run, tmp_path: Path, num_documents: int, arguments: list[object], sentence: str
) -> None:
    for number in range(num_documents):
        (tmp_path / f"{number}.txt").write_text("Mira Tolland signs.", encoding="utf-8")
    result = run("calibrate", "-d", tmp_path, *arguments)
    assert result.sentence() == f"looseleaf: {sentence}"
