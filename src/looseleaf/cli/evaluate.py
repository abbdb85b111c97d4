"""``looseleaf eval``: how often a model is right on the generated tasks."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from looseleaf.cli.options import engine_options, given
from looseleaf.cli.policies import fuse_options, take_fuses
from looseleaf.config import Fuse
from looseleaf.engine.request import DocumentContext
from looseleaf.errors import InvalidOption

TASKS = ("lookup", "bridge", "chain", "unanswerable")


@click.command("eval")
@click.argument("tasks", nargs=-1, type=click.Choice(TASKS))
@click.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    metavar="NAME",
    help="reference checkpoints, causal or block [default: both, unless --model is given]",
)
@click.option(
    "--questions", default=200, show_default=True, help="questions per task and number of hops"
)
@click.option("--documents", default=6, show_default=True, help="documents per question")
@click.option("--first-seed", default=0, show_default=True, help="the first held-out world")
@click.option("--output", type=click.Path(path_type=Path), help="CSV file to append the figures to")
@fuse_options(several=True)
@engine_options
def evaluate(
    tasks: tuple[str, ...],
    checkpoints: tuple[str, ...],
    questions: int,
    documents: int,
    first_seed: int,
    output: Path | None,
    model: str | None,
    **options: Any,
) -> None:
    """Measure exact match on held-out worlds, for TASKS (default: lookup, bridge and chain).

    Each task is read twice: with full attention, and with documents encoded by themselves and
    reused. With --fuse: with full attention, and under every policy, for another kind of file."""
    from looseleaf.bench.origin import describe_origin
    from looseleaf.bench.results import append_rows
    from looseleaf.engine.llm import LLM
    from looseleaf.engine.loading import reference_model
    from looseleaf.evals.world import TRAINING_SEEDS_START

    if questions < 1 or documents < 1:
        raise InvalidOption("--questions and --documents must be at least 1")
    if not 0 <= first_seed <= TRAINING_SEEDS_START - questions:
        raise InvalidOption(
            f"held-out worlds have seeds 0 to {TRAINING_SEEDS_START - 1}: lower --first-seed"
        )
    if model is not None and checkpoints:
        raise InvalidOption("give --model or --checkpoint, not both")
    folders = (
        {model: model}
        if model
        else {n: str(reference_model(n)) for n in checkpoints or ("causal", "block")}
    )
    seeds = range(first_seed, first_seed + questions)
    fuses = take_fuses(options)
    rows = []
    for name, folder in folders.items():
        llm = LLM(folder, **given(options))
        for task in tasks or TASKS[:3]:
            if fuses:
                rows += _measure_fuses(llm, name, task, (seeds, documents), fuses)
            else:
                rows += _measure_task(llm, name, task, seeds, documents)
    if output is not None:
        append_rows(output, [asdict(row) for row in rows], describe_origin())


def _measure_task(llm: Any, name: str, task: str, seeds: range, documents: int) -> list[Any]:
    from rich.console import Console
    from rich.progress import Progress

    from looseleaf.evals.accuracy import measure
    from looseleaf.evals.world import MAX_HOPS

    contexts: tuple[DocumentContext, ...] = ("prompt", "lead")
    rows = []
    for hops in range(1, MAX_HOPS + 1) if task == "chain" else (None,):
        for context in contexts:
            label = task if hops is None else f"{task}, {hops} hop{'s' if hops > 1 else ''}"
            with Progress(console=Console(stderr=True), transient=True) as bar:
                job = bar.add_task(f"{name}: {label}, {context}", total=len(seeds))
                row = measure(
                    llm,
                    name,
                    task,
                    hops=hops,
                    context=context,
                    seeds=seeds,
                    num_documents=documents,
                    on_answer=partial(_advance, bar, job),
                )
            low, high = row.interval
            reading = "full attention" if context == "prompt" else "documents reused"
            click.echo(
                f"{name:8} {label:14} {reading:16} {row.share:6.1%}  "
                f"({row.right} of {row.questions}, 95 % interval {low:.1%} to {high:.1%})"
            )
            rows.append(row)
    return rows


def _measure_fuses(
    llm: Any, name: str, task: str, worlds: tuple[range, int], fuses: Sequence[Fuse]
) -> list[Any]:
    """One row for full attention and one for each policy; ``worlds`` are seeds and documents."""
    from rich.console import Console
    from rich.progress import Progress

    from looseleaf.evals.blending import measure_blending
    from looseleaf.evals.world import MAX_HOPS, make_example

    rows = []
    for hops in range(1, MAX_HOPS + 1) if task == "chain" else (None,):
        examples = [make_example(task, s, num_documents=worlds[1], hops=hops) for s in worlds[0]]
        label = task if hops is None else f"{task}, {hops} hop{'s' if hops > 1 else ''}"
        for fuse in (None, *fuses):
            policy = "full attention" if fuse is None else str(fuse)
            with Progress(console=Console(stderr=True), transient=True) as bar:
                job = bar.add_task(f"{name}: {label}, {policy}", total=len(examples))
                row = measure_blending(llm, name, examples, fuse, partial(_advance, bar, job))
            click.echo(
                f"{name:8} {label:14} {policy:20} {row.share:6.1%}  ({row.right} of "
                f"{row.questions}), {row.recomputed:5.1%} of the documents computed again"
            )
            rows.append(row)
    return rows


def _advance(bar: Any, job: Any, done: int) -> None:
    bar.update(job, completed=done)
