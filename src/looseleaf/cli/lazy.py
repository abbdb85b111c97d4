"""Command groups with suggestions for unknown names, and with lazily imported commands.

Lazy imports keep PyTorch out of ``--help``."""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from looseleaf.errors import MissingPackage

LAB = "looseleaf_lab"
"""The package of the distribution that measures this one; it may be missing."""

LazyCommand = tuple[str, str]
"""``module:attribute`` of a command, and its summary in the group's help."""


class SuggestingGroup(click.Group):
    """A group whose error for an unknown command names the nearest command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click before 8.4 suggests options only
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            near = get_close_matches(args[0], known, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
            ctx.fail(f"unknown command {args[0]!r}: {advice}")
        return super().resolve_command(ctx, args)


class LazyGroup(SuggestingGroup):
    """A group that imports a command of ``lazy`` when it is called."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **options: Any) -> None:
        super().__init__(*args, **options)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        module, attribute = self.lazy[cmd_name][0].split(":")
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
            formatter.write_dl([(name, self.lazy[name][1]) for name in sorted(self.lazy)])
