"""Flags come from the configuration: each option has one, with its default and its help."""

import dataclasses
import re

import pytest

from looseleaf.cli import COMMANDS
from looseleaf.config import CacheConfig, EngineConfig, SchedulerConfig, TierConfig
from tests.cli.conftest import Run

OPTIONS = [
    field
    for section in (EngineConfig, CacheConfig, SchedulerConfig, TierConfig)
    for field in dataclasses.fields(section)
    if "help" in field.metadata
]


@pytest.mark.parametrize("command", ["ask", "chat", "eval world"])
def test_every_option_of_the_configuration_is_a_flag_with_its_help(run: Run, command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.code == 0
    text = " ".join(result.out.split())
    for option in OPTIONS:
        assert f"--{option.name.replace('_', '-')}" in text
        assert option.metadata["help"] in text
        if option.default not in (None, ""):
            assert f"[default: {option.default}]" in text


def test_every_field_but_sections_is_an_option() -> None:
    for section in (CacheConfig, SchedulerConfig, TierConfig):
        assert all("help" in field.metadata for field in dataclasses.fields(section))
    sections = {"cache", "scheduler", "tiers"}
    without = {f.name for f in dataclasses.fields(EngineConfig) if "help" not in f.metadata}
    assert without == sections


def test_help_lists_the_commands(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    for command, (_, summary) in COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(summary)}$", result.out, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_where_the_group_says_and_has_help(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.code == 0
    assert f"looseleaf {name} [OPTIONS]" in result.out.splitlines()[0]


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("servee", "serve"),
        ("asq", "ask"),
        ("bench attn attention", "attention"),
        ("bench atention", "attention"),
        ("eval wrld", "world"),
        ("cache lst", "ls"),
    ],
)
def test_an_unknown_command_names_the_nearest_one(run: Run, typed: str, near: str) -> None:
    result = run(*typed.split())
    assert result.code == 2
    assert result.out == ""
    assert near in result.err.splitlines()[-1]
    assert "did you mean" in result.err or "use one of" in result.err
