"""A starting server shows a progress bar on a terminal, and nothing in a log."""

import pytest

from looseleaf.cli.startup import startup_bar


def test_a_terminal_sees_how_far_every_stage_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with startup_bar() as tell:
        for done in range(4):
            tell("costs of attention", done, 3)
        tell("graphs", 1, 56)
    shown = capsys.readouterr().err
    assert "costs of attention" in shown
    assert "56" in shown


def test_elsewhere_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with startup_bar() as tell:
        tell("graphs", 1, 56)
    assert capsys.readouterr() == ("", "")
