"""Groups of commands: one that suggests the nearest command for a name that it does not have, and
one whose commands are imported when they are called, so that ``--help`` loads no PyTorch."""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from looseleaf.errors import MissingPackage

LAB = "looseleaf_lab"
"""The package of the distribution that measures this one; it may be missing."""

Home = tuple[str, str]
"""``module:attribute`` of a command, and the summary that the group's help shows."""


class SuggestingGroup(click.Group):
    """Names the nearest command where none has the name that was typed."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click before 8.4 suggests options only
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            near = get_close_matches(args[0], known, 1)
            meant = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
            ctx.fail(f"no command {args[0]!r}: {meant}")
        return super().resolve_command(ctx, args)


class LazyGroup(SuggestingGroup):
    """Lists ``homes`` by their summaries and imports a command when its name is typed."""

    def __init__(self, *args: Any, homes: Mapping[str, Home], **options: Any) -> None:
        super().__init__(*args, **options)
        self.homes = homes

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.homes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.homes:
            return None
        module, attribute = self.homes[cmd_name][0].split(":")
        try:
            command: click.Command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name != LAB:
                raise
            raise MissingPackage(
                f"looseleaf {cmd_name} is part of looseleaf-lab, which is not installed: "
                "pip install ./lab in a checkout"
            ) from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.homes[name][1]) for name in sorted(self.homes)])
