"""Flags come from the configuration: each option has one, with its default and its help."""

import dataclasses
import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

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


def choices(hint: Any) -> tuple[str, ...]:
    """The values of the ``Literal`` in a type, also of one that may be None."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(value for part in get_args(hint) for value in choices(part))


CHOICES = {
    name: choices(hint)
    for section in (EngineConfig, CacheConfig, SchedulerConfig, TierConfig)
    for name, hint in get_type_hints(section).items()
    if choices(hint)
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_flag_of_choices_refuses_others_and_lists_them(run: Run, name: str) -> None:
    result = run("ask", f"--{name.replace('_', '-')}", "stone", "Where?")
    assert result.code == 2
    assert f"'stone' is not one of {', '.join(map(repr, CHOICES[name]))}" in result.err


def test_optional_choices_have_flags() -> None:
    assert CHOICES["quantize"] == ("fp8", "int8", "int4")


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
