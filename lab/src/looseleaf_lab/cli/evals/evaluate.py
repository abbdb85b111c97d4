"""``looseleaf eval``: accuracy of a model by task and arm."""

from typing import Any

import click

from looseleaf.cli.lazy import SuggestingGroup
from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.evals.evaluate_more import card, from_file, report, ruler
from looseleaf_lab.cli.evals.selection import selection
from looseleaf_lab.cli.evals.shared import Evaluation, evaluation_options, held_out

_WORLD_TASKS = (
    "lookup", "bridge", "chain", "unanswerable", "look-alike", "deep-chain", "roll-call", "needle",
    "interview",
)  # fmt: skip


@click.group("eval", cls=SuggestingGroup)
def evaluate() -> None:
    """Measure the accuracy of answers."""


@evaluate.command()
@click.argument("tasks", nargs=-1, type=click.Choice(_WORLD_TASKS))
@click.option("--questions", default=200, show_default=True, help="items of each task and setting")
@click.option("--first-seed", default=0, show_default=True, help="the first held-out world")
@click.option("--documents", default=6, show_default=True, help="documents per question")
@click.option("--lines", default=40, show_default=True, help="questions per output")
@click.option("--tokens", multiple=True, type=int, help="lengths of a needle's context [1024]")
@click.option(
    "--per-context",
    default=1,
    show_default=True,
    help="separate questions about the same context (lookup, needle)",
)
@evaluation_options
def world(
    tasks: tuple[str, ...], questions: int, first_seed: int, lines: int, **options: Any
) -> None:
    """Tasks over held-out generated worlds (default: lookup, bridge and chain).

    The default arms are full attention and reuse of documents that were encoded separately; with
    --fuse, full attention and every policy. A roll-call of 40 lines needs --documents 50 or more
    and a context of 6,000 tokens; an interview of 30 lines needs 8 documents."""
    from looseleaf_lab.evals.catalog import Sizes, make_tasks

    documents, tokens = options.pop("documents"), options.pop("tokens") or (1024,)
    per_context = options.pop("per_context")
    if documents < 1:
        raise InvalidOption("--documents must be at least 1")
    if per_context < 1:
        raise InvalidOption("--per-context must be at least 1")
    seeds = held_out(first_seed, questions)
    Evaluation.take(options).run(
        lambda count: make_tasks(
            tasks or _WORLD_TASKS[:3], Sizes(documents, lines, tokens, count, per_context)
        ),
        seeds,
    )


evaluate.add_command(card)
evaluate.add_command(ruler)
evaluate.add_command(from_file)
evaluate.add_command(selection)
evaluate.add_command(report)
