"""The command line. Every expected failure ends with one sentence and exit code 2."""

import sys

import click

from looseleaf.cli.ask import ask
from looseleaf.cli.bench import bench
from looseleaf.cli.chat import chat
from looseleaf.cli.evaluate import evaluate
from looseleaf.cli.serve import serve
from looseleaf.errors import LooseleafError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="looseleaf")
def app() -> None:
    """Answers from documents that are computed once and read at any position."""


app.add_command(ask)
app.add_command(chat)
app.add_command(serve)
app.add_command(bench)
app.add_command(evaluate)


def main() -> None:
    """Run the command line; the console script's entry point."""
    try:
        app()
    except LooseleafError as error:
        click.echo(f"looseleaf: {error}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
