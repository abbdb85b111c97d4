"""The demo: both first tokens of every question, right answers, the reason for what it skips."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_demo_prints_cold_and_reused_first_tokens_and_what_it_skips(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    assert demo.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"computing with \d+ of \d+ threads: \w+", lines[0])
    matches = (re.fullmatch(r"(.+?)((?: +[\d.]+){2})", line) for line in lines)
    rows = {match[1].strip(): match for match in matches if match}
    entries = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
    skipped = [entry for entry in entries if entry["task"] == "chain"]
    assert len(skipped) == 1
    for entry in entries:
        if entry in skipped:
            at = next(n for n, line in enumerate(lines) if line.startswith(entry["question"]))
            assert "skipped" in lines[at]
            assert entry["needs"] in lines[at + 1]
            continue
        times = [float(time) for time in rows[entry["question"]][2].split()]
        assert min(times) > 0
        assert f"    {entry['answer']}" in lines
    assert "median" in rows
    assert lines[-1] == "Document tokens computed again: 0. Wrong answers: 0."
    assert not any(" at 2" in line for line in lines)
