"""The command line. Expected failures print one sentence and exit with code 2."""

import sys

import click

from looseleaf.cli.lazy import LazyGroup
from looseleaf.errors import LooseleafError

# module:attribute and help summary of each command, so that --help imports no command
COMMANDS = {
    "ask": ("looseleaf.cli.ask:ask", "Answer QUESTION from documents."),
    "bench": (
        "looseleaf_lab.cli.bench.commands:bench",
        "Measure speed against a baseline in the same run.",
    ),
    "cache": ("looseleaf.cli.cache:cache", "List, delete and verify stored documents."),
    "calibrate": (
        "looseleaf_lab.cli.evals.calibrate:calibrate",
        "Compare fuse policies with full prefill; propose a policy.",
    ),
    "chat": ("looseleaf.cli.chat:chat", "Chat about documents."),
    "conformance": (
        "looseleaf_lab.cli.conformance:conformance",
        "Check that MODEL satisfies the laws on this device.",
    ),
    "eval": ("looseleaf_lab.cli.evals.evaluate:evaluate", "Measure how often answers are right."),
    "route": ("looseleaf.cli.route:route", "Serve several servers at one address."),
    "serve": ("looseleaf.cli.serve:serve", "Serve MODEL over the OpenAI API."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="looseleaf")
def app() -> None:
    """Answer questions from documents that are computed once and read at any position."""


def main() -> None:
    """The entry point of the console script."""
    try:
        app()
    except LooseleafError as error:
        # imported late, because it imports the configuration
        from looseleaf.cli.options import flag

        click.echo(f"looseleaf: {error.named(flag)}", err=True)
        sys.exit(2)
