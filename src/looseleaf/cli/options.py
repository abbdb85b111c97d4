"""Flags generated from the configuration's dataclasses: one source for names, defaults and help."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from looseleaf.config import CacheConfig, EngineConfig, SchedulerConfig

Command = TypeVar("Command", bound=Callable[..., Any])


def engine_options(command: Command) -> Command:
    """Adds ``--model`` and a flag for every field of the engine's configuration.

    The command gets them as keyword arguments of `looseleaf.LLM`; flags that were not given are
    left out."""
    for section in (SchedulerConfig, CacheConfig, EngineConfig):
        hints = get_type_hints(section)
        for field in reversed(dataclasses.fields(section)):
            if "help" in field.metadata:
                command = _flag(field, hints[field.name])(command)
    return click.option(
        "--model",
        metavar="FOLDER|ID",
        help="checkpoint folder or hub id [default: the reference model]",
    )(command)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that somebody gave a value."""
    return {name: value for name, value in options.items() if value is not None}


def _flag(field: "dataclasses.Field[Any]", hint: Any) -> Callable[[Command], Command]:
    name = field.name.replace("_", "-")
    default = "" if field.default is None else f" [default: {field.default or repr(field.default)}]"
    help_text = field.metadata["help"] + default
    if hint is bool:
        return click.option(f"--{name}/--no-{name}", default=None, help=help_text)
    return click.option(f"--{name}", type=_click_type(hint), default=None, help=help_text)


def _click_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    if get_origin(hint) is types.UnionType:
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint
