"""The command line. Every expected failure ends with one sentence and exit code 2."""

import sys

import click

from looseleaf.cli.lazy import LazyGroup
from looseleaf.errors import LooseleafError

# a command is imported when it is called: a line here says where it is and what the help says
HOMES = {
    "ask": ("looseleaf.cli.ask:ask", "Answer QUESTION from documents."),
    "bench": (
        "looseleaf_lab.cli.bench.commands:bench",
        "Measure speed against a baseline in the same run.",
    ),
    "cache": ("looseleaf.cli.cache:cache", "Look after stored documents."),
    "calibrate": (
        "looseleaf_lab.cli.evals.calibrate:calibrate",
        "Compare fuse policies with full prefill; propose one.",
    ),
    "chat": ("looseleaf.cli.chat:chat", "Talk about documents."),
    "conformance": (
        "looseleaf_lab.cli.conformance:conformance",
        "Check that MODEL keeps the laws on this device.",
    ),
    "eval": ("looseleaf_lab.cli.evals.evaluate:evaluate", "Measure how often answers are right."),
    "serve": ("looseleaf.cli.serve:serve", "Serve MODEL over the OpenAI API."),
}


@click.group(cls=LazyGroup, homes=HOMES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="looseleaf")
def app() -> None:
    """Answers from documents that are computed once and read at any position."""


def main() -> None:
    """Run the command line; the console script's entry point."""
    try:
        app()
    except LooseleafError as error:
        # after the failure: a command that succeeds has no need of the configuration
        from looseleaf.cli.options import flag

        click.echo(f"looseleaf: {error.named(flag)}", err=True)
        sys.exit(2)
