"""``looseleaf conformance``: the laws of the design on a checkpoint and the local device."""

import json
from typing import Any

import click

from looseleaf.cli.options import ENGINE_SECTIONS, explicit_options, section_options
from looseleaf.errors import InvalidOption

_DEFAULT_TOKENS = 512


@click.command()
@click.argument("model", required=False)
@click.option(
    "--tokens",
    type=int,
    help=f"length of the longest prompt with its answer [default: {_DEFAULT_TOKENS}, or the "
    "model's limit]",
)
@click.option("--law", "laws", type=int, multiple=True, help="check this law only; may be repeated")
@click.option("--json", "as_json", is_flag=True, help="print the verdict as JSON")
@section_options(*ENGINE_SECTIONS)
@click.pass_context
def conformance(
    context: click.Context,
    /,
    model: str | None,
    tokens: int | None,
    laws: tuple[int, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Check that MODEL, a checkpoint folder or a hub id, keeps the laws on this device.

    The engine uses the checkpoint's own weights and RoPE law. Dense passes in a wider dtype are the
    truth; the same passes in the engine's dtype set the error budget. Without MODEL, checks the
    reference model. Exits with 1 if a law fails."""
    from looseleaf_lab.conformance import (
        LAWS,
        Answers,
        Subject,
        Verdict,
        check_laws,
        describe_subject,
    )

    numbers = [law.number for law in LAWS]
    unknown = [number for number in laws if number not in numbers]
    if unknown:
        raise InvalidOption(f"there is no law {unknown[0]}: the laws are 1 to {numbers[-1]}")
    if options.pop("max_model_len") is not None:
        raise InvalidOption(
            "give --tokens instead of --max-model-len: the laws choose lengths by it"
        )
    subject = Subject(
        model, explicit_options(options), tokens or _DEFAULT_TOKENS, exactly=tokens is not None
    )
    about = describe_subject(subject, model or "the reference model")
    click.echo(" · ".join(about.values()), err=True)
    verdicts = check_laws(
        Answers(subject), laws, lambda law: click.echo(f"law {law.number} …", err=True)
    )
    verdict = Verdict(about, verdicts)
    click.echo(json.dumps(verdict.to_json(), indent=2) if as_json else verdict.page())
    if verdict.failed:
        context.exit(1)
