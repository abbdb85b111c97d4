"""Command-line flags generated from the configuration's dataclasses."""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from looseleaf.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig, TierConfig
from looseleaf.errors import InvalidOption, LooseleafError

Command = TypeVar("Command", bound=Callable[..., Any])


ENGINE_SECTIONS = (TierConfig, SchedulerConfig, CacheConfig, EngineConfig)


def engine_options(command: Command) -> Command:
    """Add ``--model`` and a flag for every field of the engine's configuration.

    The command receives keyword arguments of `looseleaf.LLM`; absent flags are None."""
    return click.option(
        "--model",
        metavar="FOLDER|FILE|ID",
        help="checkpoint folder, GGUF file, hub id, or a reference model: looseleaf-reference for "
        "prompts up to a thousand tokens, looseleaf-reference-causal for longer prompts "
        "[default: looseleaf-reference]",
    )(section_options(*ENGINE_SECTIONS)(command))


def section_options(*sections: type) -> Callable[[Command], Command]:
    """Add a flag for every field of ``sections`` of the configuration."""

    def add(command: Command) -> Command:
        for section in sections:
            hints = get_type_hints(section)
            for field in reversed(dataclasses.fields(section)):
                if "help" in field.metadata:
                    command = _flag(field, hints[field.name])(command)
        return command

    return add


def field_names(*sections: type) -> list[str]:
    """The names of all fields with a flag."""
    return [
        field.name
        for section in sections
        for field in dataclasses.fields(section)
        if "help" in field.metadata
    ]


# further flags with the name of a library keyword
_OTHER_FLAGS = (
    *("model", "max_tokens", "temperature", "fuse", "select", "revise", "layer_budgets"),
    "anchors",
)


def flag(name: str) -> str:
    """The flag of a library option; the name itself if no command has a flag for it."""
    known = (*field_names(*ENGINE_SECTIONS, ServerConfig), *_OTHER_FLAGS)
    return f"--{name.replace('_', '-')}" if name in known else name


@contextmanager
def names_in_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Replace option names in errors of the block by the flags in ``names``."""
    try:
        yield
    except LooseleafError as error:
        error.args = (error.named(lambda name: names.get(name, name)),)
        error.options = tuple(name for name in error.options if name not in names)
        raise


def explicit_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options with a value on the command line."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def require_tiers(options: dict[str, Any]) -> None:
    """Raise InvalidOption for a tier option without its tier."""
    chosen = explicit_options(options)
    if "disk_gib" in chosen and not chosen.get("disk_path"):
        raise InvalidOption("--disk-gib is the size of --disk-path: give --disk-path too")
    tiers = {name: chosen.get(name) for name in ("host_gib", "disk_path", "remote_url")}
    if "tier_packing" in chosen and not any(tiers.values()):
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
    # `Literal[...] | None` is a typing.Union, `int | None` a types.UnionType
    if get_origin(hint) in (Union, types.UnionType):
        return _click_type(next(arg for arg in get_args(hint) if arg is not type(None)))
    return hint
