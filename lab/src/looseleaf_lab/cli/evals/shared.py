"""What ``looseleaf eval`` commands share: models, arms, progress, kept answers, rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from looseleaf.assets import REFERENCE_MODELS, checkpoint_of
from looseleaf.cli.options import ENGINE_SECTIONS, engine_options, explicit_options, field_names
from looseleaf.cli.policies import (
    Reading,
    fuse_options,
    reading_options,
    take_fuses,
    take_readings,
)
from looseleaf.config import Fuse
from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.bench.report import appendable, target_of

Command = TypeVar("Command", bound=Callable[..., Any])

_REVISED = ", revise "

_OPTIONS = (
    click.option(
        "--checkpoint",
        "checkpoints",
        multiple=True,
        metavar="NAME",
        callback=lambda context, parameter, names: tuple(map(checkpoint_of, names)),
        help=f"reference models: {', '.join(REFERENCE_MODELS)} [default: both, unless --model is "
        "given]",
    ),
    click.option("--arm", "arms", multiple=True, help="ways of answering [default: full, reuse]"),
    click.option("--endpoint", metavar="URL", help="ask a server with the OpenAI API instead"),
    click.option("--served-model", metavar="NAME", help="the model to ask for at --endpoint"),
    click.option("--endpoint-key", envvar="OPENAI_API_KEY", help="its key", show_envvar=True),
    click.option(
        "--documents-as",
        type=click.Choice(("text", "parts")),
        default="text",
        show_default=True,
        help="how documents are sent to --endpoint",
    ),
    click.option("--form", type=click.Choice(("chat", "bare")), help="[default: chat if it can]"),
    click.option("--batch", default=16, show_default=True, help="items asked at a time"),
    click.option(
        "--processes",
        default=1,
        show_default=True,
        help="processes that answer at the same time, each with a model and a pool of its own",
    ),
    click.option(
        "--answers",
        type=click.Path(path_type=Path, dir_okay=False),
        help="file in which answers are kept, so that a run can go on",
    ),
    click.option(
        "--output",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=appendable,
        help="CSV file to append to [default: results/evals.csv if there is a results folder]",
    ),
)


def evaluation_options(command: Command) -> Command:
    """Adds the flags of every evaluation; `Evaluation.take` reads them."""
    command = fuse_options(several=True)(reading_options(engine_options(command)))
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Evaluation:
    """What the flags ask for: which models answer in which ways, and where figures go."""

    choices: dict[str, Any]
    fuses: Sequence[Fuse]
    readings: Sequence[Reading]
    engine: dict[str, Any]

    @classmethod
    def take(cls, options: dict[str, Any]) -> "Evaluation":
        """Reads the flags. Raises InvalidOption for flags that exclude each other."""
        from looseleaf_lab.evals.catalog import ARMS

        fuses, readings = take_fuses(options), take_readings(options)
        engine = explicit_options(
            {name: options.pop(name) for name in field_names(*ENGINE_SECTIONS)}
        )
        choices = options
        chosen = [
            f"--{flag}"
            for flag, name in (("model", "model"), ("checkpoint", "checkpoints"), ("endpoint",) * 2)
            if choices[name]
        ]
        if len(chosen) > 1:
            raise InvalidOption(f"give one of {' and '.join(chosen)}")
        if choices["endpoint"] and not choices["served_model"]:
            raise InvalidOption("--endpoint needs --served-model, the name to ask for there")
        if choices["endpoint"] and (fuses or readings or choices["arms"]):
            raise InvalidOption(
                "--arm, --fuse and --select are for models in this process, not --endpoint"
            )
        if choices["endpoint"] and choices["processes"] > 1:
            raise InvalidOption("--processes is for models on this machine, not --endpoint")
        unknown = [name for name in choices["arms"] if name not in ARMS]
        if unknown:
            raise InvalidOption(f"unknown arm {unknown[0]!r}: there are {', '.join(ARMS)}")
        if choices["batch"] < 1:
            raise InvalidOption("--batch must be at least 1")
        if choices["processes"] < 1:
            raise InvalidOption("--processes must be at least 1")
        return cls(choices, fuses, readings, engine)

    def run(self, make_tasks: Callable[[Callable[[str], int]], Any], seeds: range) -> list[Any]:
        """Every task under every arm of every model; shows and returns the figures, and appends
        them to the file of results. ``make_tasks`` is told how a model counts tokens."""
        from looseleaf_lab.evals.figures import summarize

        if len(seeds) < 1:
            raise InvalidOption("--questions must be at least 1")
        self._require_output()
        figures = []
        for model, folder, runner, arms, count in self._models():
            tasks = make_tasks(count)
            if self.choices["processes"] > 1:
                self._ask_crew(runner, folder, (tasks, arms), seeds, model)
            for task in tasks:
                scored: dict[str, Any] = {}
                for arm in arms:
                    scored[arm.name] = self._ask(runner, (task, arm), seeds, model)
                    against = _baseline(arm.name, scored)
                    rows = summarize(model, task, arm, seeds, scored[arm.name], against)
                    figures += rows
                    show_figures(rows)
                    self._append(rows)
        return figures

    def run_these(self, tasks: Sequence[Any], seeds: range) -> list[Any]:
        """`run` for tasks that need not know how tokens are counted."""
        return self.run(lambda count: tasks, seeds)

    def _models(self) -> Iterator[tuple[str, Any, Any, list[Any], Callable[[str], int]]]:
        """Each model's name, its folder, its runner, its arms, and how many tokens a text has for
        it."""
        from looseleaf.llm.llm import LLM
        from looseleaf.llm.load import find_model, reference_model
        from looseleaf.models import model_fingerprint
        from looseleaf_lab.bench.origin import describe_origin
        from looseleaf_lab.evals.endpoint import EndpointArm
        from looseleaf_lab.evals.run import AnswerFile, Runner, Source
        from looseleaf_lab.evals.world import count_words

        chosen, code = self.choices, describe_origin()["commit"]
        if chosen["answers"] and code.endswith("-dirty"):
            raise InvalidOption("--answers needs committed code: else nobody knows what gave them")
        answers = None
        if chosen["answers"] or chosen["processes"] > 1:
            answers = AnswerFile(chosen["answers"])
        if chosen["endpoint"]:
            name = chosen["served_model"]
            source = Source(code, name, chosen["endpoint"])
            key = chosen["endpoint_key"] or ""
            arm = EndpointArm(chosen["endpoint"], name, key, chosen["documents_as"])
            yield name, None, Runner(source, answers, chosen["batch"]), [arm], count_words
            return
        folders: dict[str, Any] = {chosen["model"]: chosen["model"]}
        if not chosen["model"]:
            names = chosen["checkpoints"] or ("causal", "block")
            folders = {name: reference_model(name) for name in names}
        for name, folder in folders.items():
            # a file of answers is for later runs, and a model may have changed by then
            kept = bool(chosen["answers"])
            weights = model_fingerprint(find_model(folder), whole=kept).hex()
            settings = repr(sorted(self.engine.items()))
            runner = Runner(Source(code, name, weights + settings), answers, chosen["batch"])
            llm = LLM(folder, **self.engine)
            yield name, folder, runner, self.arms(llm), _counter(llm)

    def make_arms(self, folder: Any) -> list[Any]:
        """The arms over a model of their own."""
        from looseleaf.llm.llm import LLM

        return self.arms(LLM(folder, **self.engine))

    def arms(self, llm: Any) -> list[Any]:
        """The ways of answering, over ``llm``."""
        from looseleaf_lab.evals.arms import (
            EngineArm,
            EvictingArm,
            HostedArm,
            default_form,
            report_reading,
        )
        from looseleaf_lab.evals.catalog import ARMS

        form = self.choices["form"]
        alone = ("full",) if self.fuses or self.readings else ("full", "reuse")
        names = self.choices["arms"] or alone
        policies = [EngineArm(llm, str(fuse), "lead", form=form, fuse=fuse) for fuse in self.fuses]
        for reading in self.readings:
            select, revise = reading.select, reading.revise
            if select is None:
                policies.append(EvictingArm(llm, reading.policy, reading.budget, form=form))
                continue
            if select.policy == "retrieval":
                # what is found is exact: what the policy costs, and not what an index misses
                keys = select.ratio or select.tokens
                assert keys is not None
                how = {"kind": "flat", "form": form, "layer_budgets": select.layer_budgets}
                policies.append(HostedArm(llm, keys, revise=revise, **how))
                continue
            # a name says all that an answer depends on
            layers = ", every layer" if select.dense_layers == () else ""
            stale = ", stale" if revise and revise.local == "stale" else ""
            name = f"{select}{layers}" + (f"{_REVISED}{revise.window}{stale}" if revise else "")
            chosen: dict[str, Any] = {"select": select, **({"revise": revise} if revise else {})}
            arm = EngineArm(llm, name, "prompt", form=form, report=report_reading, **chosen)
            policies.append(arm)
        arms: list[Any] = [*(ARMS[name](llm, form) for name in names), *policies]
        if form is not None and form != default_form(llm):
            # answers and rows are told apart by it
            for arm in arms:
                arm.name = f"{form}: {arm.name}"
        return arms

    def _ask(self, runner: Any, asked: tuple[Any, Any], seeds: range, model: str) -> list[Any]:
        task, arm = asked
        with _progress(f"{model}: {task.name}, {task.setting}, {arm.name}", len(seeds)) as told:
            done: list[Any] = runner.run(task, arm, seeds, told)
            return done

    def _ask_crew(self, runner: Any, folder: Any, asked: Any, seeds: range, model: str) -> None:
        """Have several processes answer everything; the runner finds it all afterwards."""
        from looseleaf_lab.evals.crew import Crew

        tasks, arms = asked
        with Crew(self.choices["processes"], partial(self.make_arms, folder)) as crew:
            for task in tasks:
                label = f"{model}: {task.name}, {task.setting}, {len(arms)} arms"
                with _progress(label, len(seeds) * len(arms)) as told:
                    runner.run_ahead((task, arms), seeds, crew, told)

    @property
    def _target(self) -> Path | None:
        return target_of(self.choices["output"], "evals")

    def _require_output(self) -> None:
        from looseleaf_lab.bench.origin import describe_origin
        from looseleaf_lab.bench.results import require_appendable
        from looseleaf_lab.evals.figures import Figure

        if self._target is not None:
            names = [field.name for field in fields(Figure)]
            require_appendable(self._target, [*describe_origin(), *names])

    def _append(self, rows: Sequence[Any]) -> None:
        from looseleaf_lab.bench.origin import describe_origin
        from looseleaf_lab.bench.results import append_rows

        if self._target is not None:
            append_rows(self._target, [asdict(row) for row in rows], describe_origin())


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that is told how many are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Left())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        job = bar.add_task(label, total=total)
        yield lambda number: bar.update(job, completed=number)


def _baseline(arm: str, scored: dict[str, Any]) -> tuple[str, Any] | None:
    """What an arm's gain is over: its own policy if rows are revised, else the first arm."""
    alone = arm.split(_REVISED)[0]
    name = alone if alone != arm and alone in scored else next(iter(scored))
    return None if name == arm else (name, scored[name])


def held_out(first_seed: int, questions: int) -> range:
    """The seeds of the worlds that are asked about; raises InvalidOption for training worlds."""
    from looseleaf_lab.evals.world import TRAINING_SEEDS_START

    if not 0 <= first_seed <= TRAINING_SEEDS_START - questions:
        raise InvalidOption(
            f"held-out worlds have seeds 0 to {TRAINING_SEEDS_START - 1}: lower --first-seed"
        )
    return range(first_seed, first_seed + questions)


def _counter(llm: Any) -> Callable[[str], int]:
    return lambda text: len(llm.engine.tokenizer.encode(text))


def show_figures(rows: Sequence[Any]) -> None:
    """Say what one arm came to: its first metric with its gain, then the others."""
    first, *others = rows
    gain = (
        f", {100 * first.gain:+.1f} points over {first.against} "
        f"({100 * first.gain_low:+.1f} to {100 * first.gain_high:+.1f})"
        if first.against
        else ""
    )
    click.echo(
        f"{first.model:8} {first.task:12} {first.setting:22} {first.arm:20} {first.metric} "
        f"{first.value:6.1%} of {first.items}, 95 % interval {first.low:.1%} to {first.high:.1%}"
        + gain
    )
    if others:
        click.echo("".ljust(10) + ", ".join(f"{row.metric} {row.value:.1%}" for row in others))
