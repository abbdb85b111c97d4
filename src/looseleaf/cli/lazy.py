"""A group whose commands are imported when they are called, so that ``--help`` loads no PyTorch."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

Home = tuple[str, str]
"""``module:attribute`` of a command, and the summary that the group's help shows."""


class LazyGroup(click.Group):
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
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.homes[name][1]) for name in sorted(self.homes)])
