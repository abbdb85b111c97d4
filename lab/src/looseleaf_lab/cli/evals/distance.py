"""``looseleaf eval file --measure``: distances of arms from full prefill, question by question."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import click

from looseleaf.cli.options import ENGINE_SECTIONS, explicit_options, field_names
from looseleaf.cli.policies import take_fuses, take_readings
from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.bench.report import target_of
from looseleaf_lab.cli.evals.shared import evaluation_progress, model_label
from looseleaf_lab.cli.evals.sources import require_committed, source_of

MEASURES = ("nll", "kl", "agreement", "f1", "choice")
PARTS = ("all", "develop", "decide")


def take_measures(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[str, ...]:
    """The measures of the option, in order. Raises InvalidOption for an unknown one."""
    names = tuple(name.strip() for name in value.split(",")) if value else ()
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        raise InvalidOption(f"unknown measure {unknown[0]!r}: use {', '.join(MEASURES)}")
    return names


def measure_files(
    tasks: Sequence[Any],
    measures: Sequence[str],
    part: str,
    max_tokens: int,
    options: dict[str, Any],
) -> None:
    """Measure every file under every arm; print laws and verdicts, and append rows.

    Each question's figures are stored at once in ``--answers``, and not measured again. Raises
    InvalidOption for options that have no meaning here."""
    from looseleaf.llm.llm import LLM
    from looseleaf_lab.bench.origin import describe_origin
    from looseleaf_lab.bench.results import append_rows, require_appendable
    from looseleaf_lab.evals.arms import default_form
    from looseleaf_lab.evals.distance.arms import choose_arms
    from looseleaf_lab.evals.distance.primer import read_primer
    from looseleaf_lab.evals.distance.run import DistanceRun
    from looseleaf_lab.evals.distance.summary import DistanceRow
    from looseleaf_lab.evals.run import AnswerFile

    ceilings, primer = options.pop("ceilings"), read_primer(options.pop("primers"))
    fuses, readings = take_fuses(options), take_readings(options)
    engine = explicit_options({name: options.pop(name) for name in field_names(*ENGINE_SECTIONS)})
    if not options["model"] or options["endpoint"] or options["checkpoints"] or readings:
        raise InvalidOption("--measure takes one --model, --arm and --fuse: leave the others out")
    origin = describe_origin()
    require_committed(options["answers"], origin)
    target = target_of(options["output"], "answers")
    if target is not None:
        require_appendable(target, [*origin, *(field.name for field in fields(DistanceRow))])
    llm = LLM(options["model"], **engine)
    num_layers = llm.engine.runner.model.config.num_layers
    arms = choose_arms(options["arms"], fuses, num_layers, ceilings, primed=bool(primer))
    name = model_label(options["model"])
    source = source_of(origin, options["model"], engine)
    form = options["form"] or default_form(llm)
    run = DistanceRun(
        llm,
        form,
        max_tokens,
        AnswerFile(options["answers"]),
        source,
        4 if "choice" in measures else 1,
        primer,
    )
    for task in tasks:
        with evaluation_progress(f"{name}: {task.label}", run.count(task, arms, part)) as on_count:
            measured = run.measure(task, arms, part, on_count)
        rows = run.rows(name, task, arms, part, measured)
        for row, figures in rows:
            click.echo(_line(row, measures))
            click.echo(run.finding(row, figures))
        if target is not None and rows:
            append_rows(target, [asdict(row) for row, _ in rows], origin)


def _line(row: Any, measures: Sequence[str]) -> str:
    """The chosen measures of a row."""
    texts = {
        "nll": f"nll {row.nll:+.3f} [{row.nll_low:+.3f}, {row.nll_high:+.3f}]",
        "kl": f"KL {row.kl:.4f} [{row.kl_low:.4f}, {row.kl_high:.4f}], of the own answer "
        f"{row.kl_answer:.4f}, removed {row.kl_removed:.0%}",
        "agreement": f"agreement {row.agreement:.0%}",
        "f1": f"f1 {row.f1:.3f}",
    }
    texts["choice"] = "no choice without answers of other questions"
    if row.same_choice != "":
        texts["choice"] = f"same choice {row.same_choice:.0%}, right {row.right_choice:.0%}"
    chosen = "; ".join(texts[name] for name in measures)
    speed = f"first token {row.first_token:.3f} s, {row.sooner:.2f} times sooner"
    return f"{row.model} {row.file} {row.part} {row.arm} ({row.questions}): {chosen}; {speed}"
