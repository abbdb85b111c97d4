"""Flags generated from the configuration's dataclasses: one source for names, defaults and help."""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from looseleaf.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig, TierConfig
from looseleaf.errors import InvalidOption, LooseleafError

Command = TypeVar("Command", bound=Callable[..., Any])


ENGINE_SECTIONS = (TierConfig, SchedulerConfig, CacheConfig, EngineConfig)


def engine_options(command: Command) -> Command:
    """Adds ``--model`` and a flag for every field of the engine's configuration.

    The command gets them as keyword arguments of `looseleaf.LLM`; flags that were not given are
    left out."""
    return click.option(
        "--model",
        metavar="FOLDER|ID",
        help="checkpoint folder, hub id, or looseleaf-reference-causal, the reference model for "
        "more than a thousand tokens [default: looseleaf-reference, for fewer]",
    )(section_options(*ENGINE_SECTIONS)(command))


def section_options(*sections: type) -> Callable[[Command], Command]:
    """Adds a flag for every field of some sections of the configuration."""

    def add(command: Command) -> Command:
        for section in sections:
            hints = get_type_hints(section)
            for field in reversed(dataclasses.fields(section)):
                if "help" in field.metadata:
                    command = _flag(field, hints[field.name])(command)
        return command

    return add


def field_names(*sections: type) -> list[str]:
    """The names of all fields that have a flag."""
    return [
        field.name
        for section in sections
        for field in dataclasses.fields(section)
        if "help" in field.metadata
    ]


# flags beside those of the configuration whose names are those of the library's keywords
_OTHER_FLAGS = ("model", "max_tokens", "temperature", "fuse", "select", "revise", "layer_budgets")


def flag(name: str) -> str:
    """The flag of an option of the library; the name itself if no command has one."""
    known = (*field_names(*ENGINE_SECTIONS, ServerConfig), *_OTHER_FLAGS)
    return f"--{name.replace('_', '-')}" if name in known else name


@contextmanager
def names_in_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about options inside have the ``names`` that the command's user typed."""
    try:
        yield
    except LooseleafError as error:
        error.args = (error.named(lambda name: names.get(name, name)),)
        error.options = tuple(name for name in error.options if name not in names)
        raise


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that somebody gave a value."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def require_tiers(options: dict[str, Any]) -> None:
    """Raise InvalidOption for a flag that says how documents are kept where none are."""
    chosen = given(options)
    if "disk_gib" in chosen and not chosen.get("disk_path"):
        raise InvalidOption("--disk-gib is how much --disk-path may hold: give that too")
    if (
        "tier_packing" in chosen
        and not TierConfig(
            **{
                name: chosen[name]
                for name in ("host_gib", "disk_path", "remote_url")
                if name in chosen
            }
        ).any
    ):
        raise InvalidOption(
            "--tier-packing is for documents outside the pool: give --disk-path, --host-gib or "
            "--remote-url too"
        )


def _flag(field: "dataclasses.Field[Any]", hint: Any) -> Callable[[Command], Command]:
    name = field.name.replace("_", "-")
    default = (
        "" if field.default in (None, ()) else f" [default: {field.default or repr(field.default)}]"
    )
    help_text = field.metadata["help"] + default
    if hint is bool:
        return click.option(f"--{name}/--no-{name}", default=None, help=help_text)
    if get_origin(hint) is tuple:
        return click.option(f"--{name}", type=get_args(hint)[0], multiple=True, help=help_text)
    return click.option(f"--{name}", type=_click_type(hint), default=None, help=help_text)


def _click_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    if get_origin(hint) is types.UnionType:
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint
