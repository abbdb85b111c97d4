"""The common part of ``looseleaf eval`` commands: models, arms, progress, stored answers, rows."""

import re
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
from looseleaf_lab.cli.bench.report import check_appendable, target_of

Command = TypeVar("Command", bound=Callable[..., Any])

_REVISED = ", revise "
_GGUF_ENDING = re.compile(r"(\.(I?Q\d\w*|B?F16|F32))?\.gguf$", re.IGNORECASE)

_OPTIONS = (
    click.option(
        "--checkpoint",
        "checkpoints",
        multiple=True,
        metavar="NAME",
        callback=lambda context, parameter, names: tuple(map(checkpoint_of, names)),
        help=f"reference models: {', '.join(REFERENCE_MODELS)} [default: both, without --model]",
    ),
    click.option("--arm", "arms", multiple=True, help="kinds of answers [default: full, reuse]"),
    click.option("--endpoint", metavar="URL", help="use a server with the OpenAI API instead"),
    click.option("--served-model", metavar="NAME", help="name of the model at --endpoint"),
    click.option("--endpoint-key", envvar="OPENAI_API_KEY", help="its API key", show_envvar=True),
    click.option(
        "--documents-as",
        type=click.Choice(("text", "parts")),
        default="text",
        show_default=True,
        help="form of the documents at --endpoint",
    ),
    click.option("--form", type=click.Choice(("chat", "bare")), help="[default: chat if possible]"),
    click.option("--batch", default=16, show_default=True, help="items per batch"),
    click.option(
        "--processes",
        default=1,
        show_default=True,
        help="parallel processes, each with its own model and pool",
    ),
    click.option(
        "--answers",
        type=click.Path(path_type=Path, dir_okay=False),
        help="file that stores answers, so that a run can resume",
    ),
    click.option(
        "--output",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=check_appendable,
        help="CSV file to append to [default: results/evals.csv if there is a results folder]",
    ),
)


def evaluation_options(command: Command) -> Command:
    """Add the options of every evaluation; `Evaluation.take` reads them."""
    command = fuse_options(several=True)(reading_options(engine_options(command)))
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Evaluation:
    """The models, arms and files of an evaluation, from its options."""

    choices: dict[str, Any]
    fuses: Sequence[Fuse]
    readings: Sequence[Reading]
    engine: dict[str, Any]

    @classmethod
    def take(cls, options: dict[str, Any]) -> "Evaluation":
        """Read the options. Raises InvalidOption for options that exclude each other."""
        from looseleaf_lab.evals.catalog import ARMS

        fuses, readings = take_fuses(options), take_readings(options)
        engine = explicit_options(
            {name: options.pop(name) for name in field_names(*ENGINE_SECTIONS)}
        )
        choices = options
        sources = [
            f"--{flag}"
            for flag, name in (("model", "model"), ("checkpoint", "checkpoints"), ("endpoint",) * 2)
            if choices[name]
        ]
        if len(sources) > 1:
            raise InvalidOption(f"give one of {' and '.join(sources)}")
        if choices["endpoint"] and not choices["served_model"]:
            raise InvalidOption("--endpoint needs --served-model, the name of its model")
        if choices["endpoint"] and (fuses or readings or choices["arms"]):
            raise InvalidOption(
                "--arm, --fuse and --select are for models in this process, not --endpoint"
            )
        if choices["endpoint"] and choices["processes"] > 1:
            raise InvalidOption("--processes is for models on this machine, not --endpoint")
        unknown = [name for name in choices["arms"] if name not in ARMS]
        if unknown:
            raise InvalidOption(f"unknown arm {unknown[0]!r}: use one of {', '.join(ARMS)}")
        if choices["batch"] < 1:
            raise InvalidOption("--batch must be at least 1")
        if choices["processes"] < 1:
            raise InvalidOption("--processes must be at least 1")
        return cls(choices, fuses, readings, engine)

    def run(self, make_tasks: Callable[[Callable[[str], int]], Any], seeds: range) -> list[Any]:
        """Run every task under every arm of every model; print, append and return the figures.

        ``make_tasks`` gets the model's function for counting tokens."""
        from looseleaf_lab.evals.figures import summarize

        if len(seeds) < 1:
            raise InvalidOption("--questions must be at least 1")
        self._require_output()
        figures = []
        for model, folder, runner, arms, count in self._models():
            tasks = make_tasks(count)
            if self.choices["processes"] > 1:
                self._answer_in_pool(runner, folder, tasks, arms, seeds, model)
            for task in tasks:
                scored: dict[str, Any] = {}
                for arm in arms:
                    label = f"{model}: {task.name}, {task.setting}, {arm.name}"
                    with evaluation_progress(label, len(seeds)) as on_answer:
                        scored[arm.name] = runner.run(task, arm, seeds, on_answer)
                    against = _baseline(arm.name, scored)
                    rows = summarize(model, task, arm, seeds, scored[arm.name], against)
                    figures += rows
                    show_figures(rows)
                    self._append(rows)
        return figures

    def run_these(self, tasks: Sequence[Any], seeds: range) -> list[Any]:
        """`run` for tasks that do not count tokens."""
        return self.run(lambda count: tasks, seeds)

    def _models(self) -> Iterator[tuple[str, Any, Any, list[Any], Callable[[str], int]]]:
        """Each model's name, folder, runner, arms, and function for counting tokens."""
        from looseleaf.llm.llm import LLM
        from looseleaf.llm.load import find_model, reference_model
        from looseleaf.models import model_fingerprint
        from looseleaf_lab.bench.origin import describe_origin
        from looseleaf_lab.evals.endpoint import EndpointArm
        from looseleaf_lab.evals.run import AnswerFile, Runner, Source
        from looseleaf_lab.evals.world import count_words

        choices, code = self.choices, describe_origin()["commit"]
        if choices["answers"] and code.endswith("-dirty"):
            raise InvalidOption("--answers needs committed code, to identify its answers: commit")
        answers = None
        if choices["answers"] or choices["processes"] > 1:
            answers = AnswerFile(choices["answers"])
        if choices["endpoint"]:
            name = choices["served_model"]
            source = Source(code, name, choices["endpoint"])
            key = choices["endpoint_key"] or ""
            arm = EndpointArm(choices["endpoint"], name, key, choices["documents_as"])
            yield name, None, Runner(source, answers, choices["batch"]), [arm], count_words
            return
        folders: dict[str, Any] = {choices["model"]: choices["model"]}
        if not choices["model"]:
            names = choices["checkpoints"] or ("causal", "block")
            folders = {name: reference_model(name) for name in names}
        for name, folder in folders.items():
            # later runs reuse a file of answers, so its models need a whole fingerprint
            is_stored = bool(choices["answers"])
            weights = model_fingerprint(find_model(folder), whole=is_stored).hex()
            settings = repr(sorted(self.engine.items()))
            runner = Runner(Source(code, name, weights + settings), answers, choices["batch"])
            llm = LLM(folder, **self.engine)
            yield name, folder, runner, self.arms(llm), _counter(llm)

    def make_arms(self, folder: Any) -> list[Any]:
        """The arms over a new instance of the model."""
        from looseleaf.llm.llm import LLM

        return self.arms(LLM(folder, **self.engine))

    def arms(self, llm: Any) -> list[Any]:
        """The arms of the evaluation over ``llm``."""
        from looseleaf_lab.evals.arms import (
            EngineArm,
            EvictingArm,
            HostedArm,
            default_form,
            report_reading,
        )
        from looseleaf_lab.evals.catalog import ARMS

        form = self.choices["form"]
        default_names = ("full",) if self.fuses or self.readings else ("full", "reuse")
        names = self.choices["arms"] or default_names
        policies = [EngineArm(llm, str(fuse), "lead", form=form, fuse=fuse) for fuse in self.fuses]
        for reading in self.readings:
            select, revise = reading.select, reading.revise
            if select is None:
                policies.append(EvictingArm(llm, reading.policy, reading.budget, form=form))
                continue
            if select.policy == "retrieval":
                # a flat index is exact: the figure excludes an index's misses
                keys = select.ratio or select.tokens
                assert keys is not None
                arm = HostedArm(
                    llm,
                    keys,
                    kind="flat",
                    form=form,
                    revise=revise,
                    layer_budgets=select.layer_budgets,
                )
                policies.append(arm)
                continue
            # the name has every setting that affects an answer
            layers = ", every layer" if select.dense_layers == () else ""
            stale = ", stale" if revise and revise.local == "stale" else ""
            name = f"{select}{layers}" + (f"{_REVISED}{revise.window}{stale}" if revise else "")
            policies_of_arm: dict[str, Any] = {
                "select": select,
                **({"revise": revise} if revise else {}),
            }
            policies.append(
                EngineArm(llm, name, "prompt", form=form, report=report_reading, **policies_of_arm)
            )
        arms: list[Any] = [*(ARMS[name](llm, form) for name in names), *policies]
        if form is not None and form != default_form(llm):
            # the form is part of the key of answers and rows
            for arm in arms:
                arm.name = f"{form}: {arm.name}"
        return arms

    def _answer_in_pool(
        self,
        runner: Any,
        folder: Any,
        tasks: Sequence[Any],
        arms: Sequence[Any],
        seeds: range,
        model: str,
    ) -> None:
        """Answer everything in several processes; the runner then reuses the answers."""
        from looseleaf_lab.evals.crew import WorkerPool

        with WorkerPool(self.choices["processes"], partial(self.make_arms, folder)) as pool:
            for task in tasks:
                label = f"{model}: {task.name}, {task.setting}, {len(arms)} arms"
                with evaluation_progress(label, len(seeds) * len(arms)) as on_answer:
                    runner.run_ahead(task, arms, seeds, pool, on_answer)

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


def model_label(model: str) -> str:
    """The name of a model in rows: that of its folder, hub id or file, without a GGUF ending."""
    return _GGUF_ENDING.sub("", Path(model).name)


@contextmanager
def evaluation_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar; yields a function that sets the number of finished items."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda number: bar.update(task, completed=number)


def _baseline(arm: str, scored: dict[str, Any]) -> tuple[str, Any] | None:
    """The baseline of an arm: its own policy for revised rows, else the first arm."""
    policy = arm.split(_REVISED)[0]
    name = policy if policy != arm and policy in scored else next(iter(scored))
    return None if name == arm else (name, scored[name])


def held_out(first_seed: int, questions: int) -> range:
    """The seeds of the evaluated worlds. Raises InvalidOption for training worlds."""
    from looseleaf_lab.evals.world import TRAINING_SEEDS_START

    if not 0 <= first_seed <= TRAINING_SEEDS_START - questions:
        raise InvalidOption(
            f"held-out worlds have seeds 0 to {TRAINING_SEEDS_START - 1}: lower --first-seed"
        )
    return range(first_seed, first_seed + questions)


def _counter(llm: Any) -> Callable[[str], int]:
    return lambda text: len(llm.engine.tokenizer.encode(text))


def show_figures(rows: Sequence[Any]) -> None:
    """Print one arm's first metric with its gain, then its other metrics."""
    first, *other_figures = rows
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
    if other_figures:
        click.echo(
            "".ljust(10) + ", ".join(f"{row.metric} {row.value:.1%}" for row in other_figures)
        )
