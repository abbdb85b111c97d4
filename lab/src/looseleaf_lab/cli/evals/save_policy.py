"""``looseleaf calibrate --save``: the policy file of a model, by KL from full prefill."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click

from looseleaf.errors import InvalidOption

_TOKENS = 12
"""Length of the greedy answers, which are compared with full prefill's."""


def reference_path(model: str | None, checkpoint: str | None) -> str | None:
    """The model to calibrate: ``model``, or the folder of a reference model."""
    from looseleaf.llm.load import reference_model

    return str(reference_model(checkpoint)) if checkpoint else model


def question_tasks(
    documents: Sequence[str], questions: Sequence[str], files: Sequence[Path]
) -> list[Any]:
    """The questions about ``documents``, whose order rotates, and those of files."""
    from looseleaf_lab.evals.files import FileOptions, FileTask, read_tasks
    from looseleaf_lab.evals.task import Item

    tasks = read_tasks(files, FileOptions(max_tokens=_TOKENS)) if files else []
    items = []
    for number, question in enumerate(questions):
        first = number % len(documents)
        order = (*documents[first:], *documents[:first])
        items.append(Item(str(number), order, question, (), _TOKENS))
    return [*tasks, *([FileTask("questions", tuple(items), ())] if items else [])]


def save_policy(
    model: str | None,
    path: Path,
    sooner: float,
    tasks: Sequence[Any],
    engine: dict[str, Any],
    *,
    selectors: Sequence[str],
    ratios: Sequence[float],
    output: Path | None,
    primers: Sequence[str],
) -> None:
    """Choose the policy of a model on even questions, measure it on odd ones, and write its file.

    Rows are appended to ``output``. Raises InvalidOption."""
    from looseleaf.config import PolicyFile
    from looseleaf.llm.llm import LLM
    from looseleaf_lab.bench.origin import describe_origin
    from looseleaf_lab.bench.results import append_rows, require_appendable
    from looseleaf_lab.evals.arms import default_form
    from looseleaf_lab.evals.distance.calibrate import DistanceCalibration, Goal
    from looseleaf_lab.evals.distance.primer import read_primer
    from looseleaf_lab.evals.distance.run import DistanceRun
    from looseleaf_lab.evals.distance.summary import DistanceRow
    from looseleaf_lab.evals.run import AnswerFile

    if sooner < 0:
        raise InvalidOption(f"--sooner is a factor of 0 or more, not {sooner:g}")
    origin = describe_origin()
    if output is not None:
        require_appendable(output, [*origin, *(field.name for field in fields(DistanceRow))])
    primer = read_primer(primers)
    llm = LLM(model, **engine)
    name = Path(model).stem.split(".")[0] if model else "reference"

    def show(row: DistanceRow) -> None:
        click.echo(
            f"{row.arm:32} {row.part:8} KL {row.kl:.4f}, removed {row.kl_removed:.0%} "
            f"[{row.kl_removed_low:.0%}, {row.kl_removed_high:.0%}], agreement "
            f"{row.agreement:.0%}, {row.sooner:.2f} times sooner"
        )
        if output is not None:
            append_rows(output, [asdict(row)], origin)

    run = DistanceRun(
        llm, default_form(llm), _TOKENS, AnswerFile(None), (origin["commit"], name), 1, primer
    )
    goal = Goal(sooner=sooner)
    chosen = DistanceCalibration(run, name, tasks, goal, show).search(selectors, ratios)
    texts = primer if chosen.has_primer else ()
    model_config = llm.engine.runner.model.config
    PolicyFile.of(model_config, chosen.fuse, texts, chosen.figures()).write(path)
    reached = "reaches" if goal.is_met(chosen.decided) else "misses"
    click.echo(
        f"{path}: {chosen.decided.arm}; on {chosen.decided.questions} other questions it {reached} "
        f"{goal.removed:.0%} of KL removed, {goal.agreement:.0%} agreement and {goal.sooner:g} "
        "times sooner"
    )
    if chosen.ceiling is not None:
        click.echo(
            f"tokens chosen with full knowledge at this share remove {chosen.ceiling:.0%} of KL"
        )
