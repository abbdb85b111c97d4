"""What the README shows runs as printed."""

import re
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


def _split(arguments: str) -> list[str]:
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', arguments)]
