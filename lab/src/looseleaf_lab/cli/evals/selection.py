"""``looseleaf eval selection``: the budgets at which selection of keys equals dense decoding."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click

from looseleaf.cli.options import ENGINE_SECTIONS, engine_options, explicit_options, field_names
from looseleaf.cli.policies import reading_options, take_readings
from looseleaf.config import EVICTING, Select
from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.bench.report import check_appendable, target_of
from looseleaf_lab.cli.evals.shared import evaluation_progress, held_out, model_label
from looseleaf_lab.cli.evals.sources import require_committed, source_of


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--needles", default=30, show_default=True, help="contexts with one fact each")
@click.option("--tokens", default=4096, show_default=True, help="length of a needle's context")
@click.option("--questions", default=200, show_default=True, help="entries of each file, at most")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=check_appendable,
    help="CSV file to append to [default: results/selection.csv if there is a results folder]",
)
@click.option(
    "--answers",
    type=click.Path(path_type=Path, dir_okay=False),
    help="file with the figures of every question, so that a second run continues",
)
@reading_options
@engine_options
def selection(
    paths: tuple[Path, ...], needles: int, tokens: int, questions: int, **options: Any
) -> None:
    """Loss and KL of --select at every --budget from dense decoding, over needles and files.

    Each token of a right answer is predicted by a decode row, and the answer is given. The last
    line names the smallest budget of a policy that is within 0.05 nats of dense decoding."""
    from looseleaf.llm.llm import LLM
    from looseleaf_lab.bench.origin import describe_origin
    from looseleaf_lab.bench.results import append_rows, require_appendable
    from looseleaf_lab.evals.distance.selection import (
        SelectionMeter,
        SelectionRow,
        smallest_budgets,
    )
    from looseleaf_lab.evals.run import AnswerFile

    readings = take_readings(options)
    selects = [reading.select for reading in readings if reading.select and not reading.revise]
    hosted = [r.policy for r in readings if r.policy in (*EVICTING, "retrieval")]
    if hosted or len(selects) < len(readings):
        raise InvalidOption("selection takes policies that choose pages, without --revise")
    if not selects:
        raise InvalidOption("give a --select, and budgets with --budget")
    if not (options["model"] and (needles > 0 or paths)):
        raise InvalidOption("selection needs a --model, and --needles or files")
    origin, target = describe_origin(), target_of(options["output"], "selection")
    require_committed(options["answers"], origin)
    if target is not None:
        require_appendable(target, [*origin, *(field.name for field in fields(SelectionRow))])
    engine = explicit_options({name: options.pop(name) for name in field_names(*ENGINE_SECTIONS)})
    llm = LLM(options["model"], **engine)
    name = model_label(options["model"])
    source = source_of(origin, options["model"], engine)
    meter = SelectionMeter(llm, name, AnswerFile(options["answers"]), source)
    pairs: list[tuple[Select, SelectionRow]] = []
    for label, items in _sources(llm, paths, needles, tokens, questions):
        with evaluation_progress(f"{meter.name}: {label}", len(items)) as on_count:
            rows = meter.measure(label, items, selects, on_count)
        pairs += zip(selects, rows, strict=True)
        for row in rows:
            click.echo(_line(row))
        if target is not None:
            append_rows(target, [asdict(row) for row in rows], origin)
    for policy, arm in smallest_budgets(pairs).items():
        result = f"{arm} is the smallest budget" if arm else "no budget of these is"
        click.echo(f"{policy}: {result} within 0.05 nats of dense decoding")


def _sources(
    llm: Any, paths: Sequence[Path], needles: int, tokens: int, questions: int
) -> list[tuple[str, Sequence[Any]]]:
    """Labels and items of the needles and of every file."""
    from looseleaf_lab.evals.files import FileOptions, read_tasks
    from looseleaf_lab.evals.world_tasks import NeedleTask

    sources: list[tuple[str, Sequence[Any]]] = []
    if needles > 0:
        task = NeedleTask(tokens, lambda text: len(llm.engine.tokenizer.encode(text)))
        sources.append((f"needle {tokens}", task.items(held_out(0, needles))))
    if paths:
        for file in read_tasks(paths, FileOptions()):
            sources.append((file.label, file.entries[: max(0, questions)]))
    return sources


def _line(row: Any) -> str:
    return (
        f"{row.model} {row.file} {row.arm} ({row.questions}): {row.pages_read:.1%} of pages; nll "
        f"{row.nll:+.4f} [{row.nll_low:+.4f}, {row.nll_high:+.4f}], worst {row.worst:+.3f}; KL "
        f"{row.kl:.4f} [{row.kl_low:.4f}, {row.kl_high:.4f}]"
    )
