"""Every command that the page of claims names is there, with its flags, and so are its rows."""

import re
from pathlib import Path

import click
import pytest

from looseleaf.cli import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"`looseleaf ([^`]+)`", PAGE)))


def _resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    command: click.Command = app
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"no command {words[0]!r}"
        command, words = found, words[1:]
    return command, words


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page_takes_the_flags_that_stand_there(line: str) -> None:
    command, rest = _resolve(line.split())
    # parsed as a user types it, never run
    command.make_context(line, rest, resilient_parsing=False)


def test_all_five_papers_have_claims_and_no_place_was_left_open() -> None:
    papers = re.findall(r"^## (\w+) \(arXiv", PAGE, re.MULTILINE)
    assert len(papers) == 5 and len(COMMANDS) > 8
    assert not re.findall(r"\| [A-Z]{4,} \|", PAGE)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+\.csv)`", PAGE))))
def test_the_rows_that_the_page_quotes_are_in_the_repository(name: str) -> None:
    assert (ROOT / "results" / name).is_file()
