"""``looseleaf calibrate --anchors-at``: the anchor layers of a model, by KL from dense decoding."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.evals.shared import model_label
from looseleaf_lab.cli.evals.sources import require_committed, source_of


@dataclass(frozen=True)
class AnchorSearch:
    """The options of the search: the policy file to ``save``, ``files`` of questions, the ``share``
    of keys that a row reads, the ``output`` of rows, and the file of ``answers``."""

    save: Path | None
    files: Sequence[Path]
    share: float
    output: Path | None
    answers: Path | None

    def run(self, model: str | None, checkpoint: str | None, engine: dict[str, Any]) -> None:
        """Choose the anchors on even questions, measure them on odd ones, and write the file.

        Raises InvalidOption."""
        from looseleaf.config import PolicyFile, Select
        from looseleaf.llm.llm import LLM
        from looseleaf.llm.load import reference_model
        from looseleaf_lab.bench.origin import describe_origin
        from looseleaf_lab.bench.results import append_rows, require_appendable
        from looseleaf_lab.evals.distance.anchors import TOLERANCE, AnchorCalibration
        from looseleaf_lab.evals.distance.selection import SelectionMeter, SelectionRow
        from looseleaf_lab.evals.files import FileOptions, read_tasks
        from looseleaf_lab.evals.run import AnswerFile

        if self.save is None or not self.files:
            raise InvalidOption("--anchors-at needs a policy file, --save, and questions, --file")
        select, origin = Select("quest", ratio=self.share, dense_below=0), describe_origin()
        require_committed(self.answers, origin)
        if self.output is not None:
            names = [*origin, *(field.name for field in fields(SelectionRow))]
            require_appendable(self.output, names)
        tasks = read_tasks(self.files, FileOptions())
        items = [entry for task in tasks for entry in task.entries]
        path = str(reference_model(checkpoint)) if checkpoint else model
        llm = LLM(path, **engine)
        shape = llm.engine.runner.model.config
        policy = PolicyFile.read(self.save) if self.save.exists() else PolicyFile.of(shape, None)
        policy.require_model(shape)

        def keep(row: SelectionRow) -> None:
            click.echo(
                f"{row.arm:40} {row.file}: KL {row.kl:.4f} [{row.kl_low:.4f}, {row.kl_high:.4f}], "
                f"loss {row.nll:+.4f} [{row.nll_low:+.4f}, {row.nll_high:+.4f}]"
            )
            if self.output is not None:
                append_rows(self.output, [asdict(row)], origin)

        source, answers = source_of(origin, path, engine), AnswerFile(self.answers)
        meter = SelectionMeter(llm, model_label(path) if path else "reference", answers, source)
        search = AnchorCalibration(meter, select, keep)
        anchored = search.search(" ".join(task.label for task in tasks), items)
        measured = {**policy.measured, "anchors": anchored.figures()}
        replace(policy, anchors=anchored.anchors, measured=measured).write(self.save)
        if anchored.anchors is None:
            click.echo(
                f"{self.save}: every layer chooses; no shared choice has a KL within "
                f"{TOLERANCE:g} times that of choices in every layer"
            )
            return
        text = " ".join(map(str, anchored.anchors))
        click.echo(f"{self.save}: layers {text} choose for {shape.num_layers} layers")
