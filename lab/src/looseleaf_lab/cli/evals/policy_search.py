"""``looseleaf calibrate --save``: the policy file of a model, by KL from full prefill."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click

from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.evals.shared import model_label
from looseleaf_lab.cli.evals.sources import require_committed, source_of

_TOKENS = 12
"""Length of the greedy answers, which are compared with full prefill's."""


@dataclass(frozen=True)
class PolicySearch:
    """The options of the search: the file to ``save``, ``files`` of questions, names of the
    primer's texts, the wanted speed, selectors, ratios, the ``output`` of rows, and the file of
    ``answers``."""

    save: Path | None
    files: Sequence[Path]
    primers: Sequence[str]
    sooner: float
    selectors: Sequence[str]
    ratios: Sequence[float]
    output: Path | None
    answers: Path | None = None

    @property
    def wanted(self) -> bool:
        """Whether a policy file is written. Raises InvalidOption for options that need one."""
        if (self.files or self.answers) and self.save is None:
            raise InvalidOption("--file and --answers are for a policy file: give --save, too")
        return self.save is not None

    def run(
        self,
        model: str | None,
        checkpoint: str | None,
        documents: Sequence[str],
        questions: Sequence[str],
        engine: dict[str, Any],
    ) -> None:
        """Choose the policy on even questions, measure it on odd ones, and write its file.

        Raises InvalidOption."""
        from looseleaf.config import PolicyFile
        from looseleaf.llm.llm import LLM
        from looseleaf.llm.load import reference_model
        from looseleaf_lab.bench.origin import describe_origin
        from looseleaf_lab.bench.results import require_appendable
        from looseleaf_lab.evals.arms import default_form
        from looseleaf_lab.evals.distance.calibrate import DistanceCalibration, Goal
        from looseleaf_lab.evals.distance.primer import read_primer
        from looseleaf_lab.evals.distance.run import DistanceRun
        from looseleaf_lab.evals.distance.summary import DistanceRow
        from looseleaf_lab.evals.run import AnswerFile

        assert self.save is not None, "a search writes a file"
        tasks = question_tasks(documents, questions, self.files)
        if self.sooner < 0:
            raise InvalidOption(f"--sooner is a factor of 0 or more, not {self.sooner:g}")
        origin = describe_origin()
        require_committed(self.answers, origin)
        if self.output is not None:
            names = [*origin, *(field.name for field in fields(DistanceRow))]
            require_appendable(self.output, names)
        primer = read_primer([name for name in self.primers if name])
        path = str(reference_model(checkpoint)) if checkpoint else model
        name = model_label(path) if path else "reference"
        llm = LLM(path, **engine)
        source, answers = source_of(origin, path, engine), AnswerFile(self.answers)
        run = DistanceRun(
            llm, default_form(llm), _TOKENS, answers, source, num_candidates=1, primer=primer
        )
        goal = Goal(sooner=self.sooner)
        calibration = DistanceCalibration(
            run, name, tasks, goal, lambda row: self._keep(row, origin)
        )
        chosen = calibration.search(self.selectors, self.ratios)
        shape, texts = llm.engine.runner.model.config, primer if chosen.has_primer else ()
        PolicyFile.of(shape, chosen.fuse, texts, chosen.figures()).write(self.save)
        reached = "reaches" if goal.is_met(chosen.decided) else "misses"
        click.echo(
            f"{self.save}: {chosen.decided.arm}; on {chosen.decided.questions} other questions it "
            f"{reached} {goal.removed:.0%} of KL removed, {goal.agreement:.0%} agreement and "
            f"{goal.sooner:g} times sooner"
        )
        if chosen.ceiling is not None:
            click.echo(
                "tokens chosen with full knowledge at this share remove "
                f"{chosen.ceiling:.0%} of KL without a primer"
            )

    def _keep(self, row: Any, origin: dict[str, str]) -> None:
        from looseleaf_lab.bench.results import append_rows

        click.echo(
            f"{row.arm:40} {row.part:8} KL {row.kl:.4f}, removed {row.kl_removed:.0%} "
            f"[{row.kl_removed_low:.0%}, {row.kl_removed_high:.0%}], agreement "
            f"{row.agreement:.0%}, {row.sooner:.2f} times sooner"
        )
        if self.output is not None:
            append_rows(self.output, [asdict(row)], origin)


def question_tasks(
    documents: Sequence[str], questions: Sequence[str], files: Sequence[Path]
) -> list[Any]:
    """The questions about ``documents``, whose order rotates, and those of files.

    Raises InvalidOption without questions, and for questions about fewer than two documents."""
    from looseleaf_lab.evals.files import FileOptions, FileTask, read_tasks
    from looseleaf_lab.evals.task import Item

    if not questions and not files:
        raise InvalidOption("give questions with -q, --questions or --file")
    if questions and len(documents) < 2:
        raise InvalidOption(f"give two documents or more with -d, not {len(documents)}")
    tasks = read_tasks(files, FileOptions(max_tokens=_TOKENS)) if files else []
    items = []
    for number, question in enumerate(questions):
        first = number % len(documents)
        order = (*documents[first:], *documents[:first])
        items.append(Item(str(number), order, question, (), _TOKENS))
    return [*tasks, *([FileTask("questions", tuple(items), ())] if items else [])]
