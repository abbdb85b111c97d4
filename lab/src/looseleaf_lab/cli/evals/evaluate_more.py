"""``looseleaf eval all``, ``ruler``, ``file``: the model card's figures, RULER, and own data."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.evals.distance import MEASURES, PARTS, measure_files, take_measures
from looseleaf_lab.cli.evals.shared import Evaluation, evaluation_options, held_out

_CARD_TASKS = ("lookup", "bridge", "chain", "unanswerable")
_LONG_TASKS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("deep-chain", {}, 1),
    ("roll-call", {"documents": 50}, 25),
    ("needle", {"tokens": (16_384,)}, 10),
    ("needle", {"tokens": (4096, 16_384), "per_context": 8}, 5),
)
"""Tasks of the card for ``causal`` alone: name, sizes, and the divisor of --questions."""


@click.command("all")
@click.option(
    "--questions",
    default=200,
    show_default=True,
    help="items of each task and setting; fewer for long ones: needles and roll-calls",
)
@evaluation_options
def card(questions: int, **options: Any) -> None:
    """Measure the figures of the model card again, and compare them.

    Exits with 1 if a figure of the card is outside of the measured interval."""
    from looseleaf_lab.evals.card import compare, read_card

    if options["model"] or options["endpoint"] or options["arms"] or options["selectors"]:
        raise InvalidOption(
            "eval all measures the reference checkpoints of the card: "
            "use eval world for other models and policies"
        )
    published, checkpoints = read_card(), options["checkpoints"]
    figures = Evaluation.take({**options}).run(
        partial(_make_tasks, _CARD_TASKS, {}), held_out(0, questions)
    )
    if not checkpoints or "causal" in checkpoints:
        causal_options = options | {"checkpoints": ("causal",), "arms": ("full",)}
        for name, sizes, share in _LONG_TASKS:
            figures += Evaluation.take({**causal_options}).run(
                partial(_make_tasks, (name,), sizes), held_out(0, -(-questions // share))
            )
    lines, agree = compare(figures, published)
    click.echo("\n".join(["", *lines]))
    if not agree:
        raise SystemExit(1)


def _make_tasks(
    names: tuple[str, ...], sizes: dict[str, Any], count: Callable[[str], int]
) -> list[Any]:
    from looseleaf_lab.evals.catalog import Sizes, make_tasks

    return make_tasks(names, Sizes(count=count, **sizes))


@click.command()
@click.argument("kinds", nargs=-1, metavar="[TYPES]...")
@click.option("--tokens", multiple=True, type=int, help="lengths of the prompts [default: 1024]")
@click.option("--questions", default=50, show_default=True, help="prompts of each type and length")
@click.option("--first-seed", default=0, show_default=True)
@evaluation_options
def ruler(
    kinds: tuple[str, ...],
    tokens: tuple[int, ...],
    questions: int,
    first_seed: int,
    **options: Any,
) -> None:
    """RULER's task types over our own text (default: all 13), at any length.

    The types: niah-single-1 to -3, niah-multikey-1 to -3, niah-multivalue, niah-multiquery, vt,
    cwe, fwe, qa-1, qa-2. Lengths are by the model's tokenizer, for an endpoint by words."""
    from looseleaf_lab.evals.ruler import KINDS, RulerTask

    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise InvalidOption(f"unknown type {unknown[0]!r}: use one of {', '.join(KINDS)}")
    Evaluation.take(options).run(
        lambda count: [
            RulerTask(kind, length, count)
            for length in tokens or (1024,)
            for kind in kinds or KINDS
        ],
        held_out(first_seed, questions),
    )


@click.command("file")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--metric", "metrics", multiple=True, help="f1, exact, contains, rouge-l; several")
@click.option("--instruction", help="text before the documents; '' for none")
@click.option("--max-tokens", default=64, show_default=True, help="length of an answer")
@click.option("--page-words", default=400, show_default=True, help="words per document of a text")
@click.option("--join", default=1, show_default=True, help="questions answered in one output")
@click.option("--questions", default=200, show_default=True, help="entries of each file, at most")
@click.option(
    "--measure",
    callback=take_measures,
    help=f"distances from full prefill, with commas: {', '.join(MEASURES)}",
)
@click.option(
    "--part",
    type=click.Choice(PARTS),
    default="all",
    show_default=True,
    help="with --measure: develop has entries 0, 2, ..., decide 1, 3, ...",
)
@click.option(
    "--ceiling",
    "ceilings",
    multiple=True,
    type=click.FloatRange(0, 1),
    help="with --measure: shares of tokens chosen with full knowledge",
)
@click.option(
    "--primer",
    "primers",
    multiple=True,
    metavar="default|FILE",
    help="with --measure: also documents that are computed behind these texts; several",
)
@evaluation_options
def from_file(
    paths: tuple[Path, ...],
    metrics: tuple[str, ...],
    join: int,
    questions: int,
    measure: tuple[str, ...],
    part: str,
    **options: Any,
) -> None:
    """Questions or summaries from JSON files in the formats of CacheBlend and LongBench.

    With --join N, N entries form one prompt with one long output, as in LongGenBench. With
    --measure, arms are compared with full prefill of the same --model: none, full, prefix, reuse,
    alone, and every --fuse."""
    from looseleaf_lab.evals.files import FileOptions, read_tasks
    from looseleaf_lab.evals.joined import Joined

    if join < 1:
        raise InvalidOption("--join must be at least 1")
    names = ("instruction", "max_tokens", "page_words")
    file_options = FileOptions(
        metrics or FileOptions.metrics, **{name: options.pop(name) for name in names}
    )
    files = [
        replace(task, entries=task.entries[: max(0, questions)])
        for task in read_tasks(paths, file_options)
    ]
    if measure:
        measure_files(files, measure, part, file_options.max_tokens, options)
        return
    options.pop("ceilings")
    if options.pop("primers"):
        raise InvalidOption("--primer is for --measure: give both")
    evaluation = Evaluation.take(options)
    for task in files:
        joined_count = min(join, len(task.entries))
        prompts = range(-(-len(task.entries) // join))
        evaluation.run_these([Joined(task, joined_count) if join > 1 else task], prompts)


@click.command()
@click.option(
    "--results",
    default="results",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="folder of the rows",
)
@click.option(
    "--output",
    default="build/report",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="folder for the page, its plots and tables",
)
@click.option("--format", "kind", type=click.Choice(("svg", "png")), default="svg")
def report(results: Path, output: Path, kind: Any) -> None:
    """Draw tables, plots and one static page from the rows in results/."""
    from looseleaf_lab.evals.report import write_report

    for path in write_report(results, output, kind):
        click.echo(path)
