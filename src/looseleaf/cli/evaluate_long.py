"""``looseleaf eval interview``: how errors add up in a long output, by what each token reads."""

from pathlib import Path
from typing import Any

import click

from looseleaf.cli.evaluating import held_out, show_figures
from looseleaf.cli.options import engine_options, given
from looseleaf.errors import InvalidOption


@click.command()
@click.option("--items", default=12, show_default=True, help="worlds asked about")
@click.option("--first-seed", default=0, show_default=True, help="the first held-out world")
@click.option("--lines", default=36, show_default=True, help="questions answered in one output")
@click.option("--documents", default=8, show_default=True, help="documents of a world")
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    type=float,
    help="share of the context that is read; may be repeated [default: 0.05, 0.1, 0.15, 0.25]",
)
@click.option(
    "--policy", "names", multiple=True, help="select policies besides quest [default: window]"
)
@click.option(
    "--window",
    "windows",
    multiple=True,
    type=click.IntRange(2, 9),
    help="rows that are revised on top of quest; may be repeated [default: 2, 4, 8]",
)
@click.option("--no-revise", is_flag=True, help="leave revision out")
@click.option("--every-layer", is_flag=True, help="leave no layer dense")
@click.option("--answers", type=click.Path(path_type=Path, dir_okay=False), help="kept answers")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="CSV to append to")
@engine_options
def interview(first_seed: int, items: int, model: str | None, **options: Any) -> None:
    """Many questions answered one after another in one output of hundreds of tokens.

    The reference model `causal`, unless --model is given. Full attention first, then for every
    budget the select policies and revision; each figure is paired with full attention, and that of
    revision with quest at the same budget."""
    from looseleaf.engine.llm import LLM
    from looseleaf.engine.loading import reference_model
    from looseleaf.evals.interview import Interview

    names = ("lines", "documents", "budgets", "names", "windows", "every_layer", "no_revise")
    chosen = {name: options.pop(name) for name in names}
    files = options.pop("answers"), options.pop("output")
    if items < 1:
        raise InvalidOption("--items must be at least 1")
    name = model or "causal"
    llm = LLM(model or str(reference_model("causal")), **given(options))
    task = Interview(chosen["lines"], chosen["documents"])
    _run(llm, (name, task, held_out(first_seed, items)), chosen, files)


def _run(
    llm: Any,
    asked: tuple[str, Any, range],
    chosen: dict[str, Any],
    files: tuple[Path | None, Path | None],
) -> None:
    from dataclasses import asdict

    from looseleaf.bench.origin import describe_origin
    from looseleaf.bench.results import append_rows
    from looseleaf.evals.figures import summarize
    from looseleaf.evals.run import AnswerFile, Runner, Source

    name, task, seeds = asked
    origin = describe_origin()
    answers, output = files
    if answers and origin["commit"].endswith("-dirty"):
        raise InvalidOption("--answers needs committed code: else nobody knows what gave them")
    kept = AnswerFile(answers) if answers else None
    runner = Runner(Source(origin["commit"], name), kept, batch=len(seeds))
    baselines: dict[str, Any] = {}
    for arm, against in _arms(llm, chosen):
        scored = runner.run(task, arm, seeds)
        figures = summarize(name, task, arm, seeds, scored, baselines.get(against))
        baselines[arm.name] = arm.name, scored
        show_figures(figures)
        if output is not None:
            append_rows(output, [asdict(row) for row in figures], origin)


def _arms(llm: Any, chosen: dict[str, Any]) -> list[tuple[Any, str]]:
    """The arms in order, each with the name of that which it is compared with."""
    from looseleaf.config import EVICTING, Revise, Select
    from looseleaf.evals.interview import EvictingArm, InterviewArm, report_revision

    dense: dict[str, Any] = {"dense_layers": ()} if chosen["every_layer"] else {}
    # a name says all that an answer depends on
    layers = ", every layer" if chosen["every_layer"] else ""
    arms: list[tuple[Any, str]] = [(InterviewArm(llm, "full attention", "prompt"), "")]

    def add(name: str, against: str, **policies: Any) -> None:
        arm = InterviewArm(llm, name, "prompt", report=report_revision, **policies)
        arms.append((arm, against))

    for budget in chosen["budgets"] or (0.05, 0.1, 0.15, 0.25):
        for policy in ("quest", *(chosen["names"] or ("window",))):
            if policy in EVICTING:
                arms.append((EvictingArm(llm, policy, budget), "full attention"))
                continue
            select = Select(policy, ratio=budget, **dense)
            add(f"{select}{layers}", "full attention", select=select)
        quest = Select("quest", ratio=budget, **dense)
        for window in () if chosen["no_revise"] else chosen["windows"] or (2, 4, 8):
            name = f"{quest}{layers}"
            add(f"{name}, revise {window}", name, select=quest, revise=Revise(window))
    return arms
