"""What the README shows runs as printed, and the demo is right about its own documents."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from looseleaf.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_examples_run_as_printed(code, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {})
    assert "Mira Tolland" in capsys.readouterr().out


def test_the_command_that_asks_about_the_examples_answers(monkeypatch):
    monkeypatch.chdir(ROOT)
    (arguments,) = re.findall(r'looseleaf (ask -d examples/documents "[^"]*" --show-reuse)', README)
    done = CliRunner().invoke(app, _split(arguments))
    assert done.exit_code == 0
    assert "north wing" in done.output


def test_the_demo_answers_and_recomputes_no_document_in_the_second_round():
    command = [sys.executable, str(ROOT / "examples" / "demo.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Document tokens computed in the second round: 0" in done.stdout


def _split(arguments: str) -> list[str]:
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', arguments)]
