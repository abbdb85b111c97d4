"""``looseleaf calibrate``: propose a fuse policy for a model and a user's documents."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

import click

from looseleaf.assets import REFERENCE_MODELS, checkpoint_of
from looseleaf.cli.documents import read_documents
from looseleaf.cli.options import ENGINE_SECTIONS, explicit_options, section_options
from looseleaf.config import FuseSelector
from looseleaf.config.option import require, shown
from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.bench.report import check_appendable
from looseleaf_lab.cli.evals.anchor_search import AnchorSearch
from looseleaf_lab.cli.evals.policy_search import PolicySearch

_DEFAULT_SELECTORS = ("first", "question", "links", "deviation")
_WITH_RATIO = [s for s in get_args(FuseSelector) if s not in ("none", "all", "ape")]


@click.command()
@click.argument("model", required=False)
@click.option(
    "--checkpoint",
    metavar="NAME",
    callback=lambda context, parameter, name: name and checkpoint_of(name),
    help=f"a reference model as MODEL: {', '.join(REFERENCE_MODELS)}",
)
@click.option("-d", "--document", "names", multiple=True, metavar="FILE", help="file or folder")
@click.option("-q", "--question", "questions", multiple=True, help="may be repeated")
@click.option(
    "--questions",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="a text file with a question a line",
)
@click.option(
    "--fuse",
    "selectors",
    multiple=True,
    type=click.Choice(_WITH_RATIO),
    help=f"[default: {', '.join(_DEFAULT_SELECTORS)}]",
)
@click.option("--ratio", "ratios", multiple=True, type=float, help="[default: 0.05 to 0.3]")
@click.option(
    "--tolerance",
    default=0.02,
    show_default=True,
    help="share of answers that may differ from full prefill's",
)
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="questions with their own documents, in a format of `looseleaf eval file`; several",
)
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    help="policy file to write, for --policy: the least KL from full prefill at --sooner",
)
@click.option(
    "--primer",
    "primers",
    multiple=True,
    default=("default",),
    metavar="default|FILE",
    help="with --save: texts before documents that are tried as a primer [default: made-up "
    "English passages]; several, '' for none",
)
@click.option(
    "--sooner",
    default=3.0,
    show_default=True,
    help="with --save: factor by which the first token should precede full prefill's",
)
@click.option(
    "--anchors-at",
    type=float,
    metavar="SHARE",
    help="with --save and --file: find the layers whose choice of pages serves others, for Quest "
    "with this share of the keys, instead of a blending policy; the file keeps its other entries",
)
@click.option(
    "--answers",
    type=click.Path(dir_okay=False, path_type=Path),
    help="with --save: file with the figures of every question, so that a second run continues",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=check_appendable,
    help="CSV file",
)
@section_options(*ENGINE_SECTIONS)
def calibrate(
    model: str | None,
    checkpoint: str | None,
    names: tuple[str, ...],
    questions: tuple[str, ...],
    file: Path | None,
    **options: Any,
) -> None:
    """Compare fuse policies of MODEL with full prefill on documents (-d) and questions (-q), and
    propose the cheapest policy within the tolerance.

    With --save, the policy with the least KL from full prefill at the wanted speed is written to a
    file, which other commands take as --policy. Its questions come from -q or from --file. With
    --anchors-at, too, the file gets the anchor layers of selections.
    Selectors with layer settings are first tried at several layers."""
    selectors = options.pop("selectors") or _DEFAULT_SELECTORS
    ratios = options.pop("ratios") or (0.05, 0.1, 0.15, 0.2, 0.3)
    tolerance, output = options.pop("tolerance"), options.pop("output")
    share, answers = options.pop("anchors_at"), options.pop("answers")
    search = PolicySearch(
        save=options.pop("save"),
        files=options.pop("files"),
        primers=options.pop("primers"),
        sooner=options.pop("sooner"),
        selectors=selectors,
        ratios=ratios,
        output=output,
        answers=answers,
    )
    for ratio in ratios:
        require(0 < ratio <= 1, f"--ratio must be above 0 and at most 1, not {shown(ratio)}")
    fits = 0 <= tolerance < 1
    require(fits, f"--tolerance must be from 0 to below 1, not {shown(tolerance)}")
    if model and checkpoint:
        raise InvalidOption("give MODEL or --checkpoint, not both")
    if not all(question.strip() for question in questions):
        raise InvalidOption("-q needs a question: one is empty")
    all_questions = [*questions, *(_questions(file) if file else [])]
    documents = read_documents(names)
    if share is not None:
        anchors = AnchorSearch(search.save, search.files, share, output, answers)
        anchors.run(model, checkpoint, explicit_options(options))
        return
    if search.wanted:
        texts = [document.texts[0] for document in documents]
        search.run(model, checkpoint, texts, all_questions, explicit_options(options))
        return
    if len(documents) < 2:
        raise InvalidOption(f"give two documents or more with -d, not {len(documents)}")
    if not all_questions:
        raise InvalidOption("give a question with -q, or a file of them with --questions")

    from looseleaf.llm.llm import LLM
    from looseleaf.llm.load import reference_model
    from looseleaf_lab.bench.origin import describe_origin
    from looseleaf_lab.bench.results import append_rows, require_appendable
    from looseleaf_lab.evals.calibration import Calibration, CalibrationRow, propose

    origin = describe_origin()
    if output is not None:
        require_appendable(output, [*origin, *(field.name for field in fields(CalibrationRow))])
    name = Path(model).name if model else checkpoint or "reference"
    llm = LLM(reference_model(checkpoint) if checkpoint else model, **explicit_options(options))
    calibration = Calibration(llm, name, documents, all_questions)
    click.echo(_line("policy", "agree", "KL", "text", "left", "again", "cost"))

    def keep(row: CalibrationRow) -> None:
        _show(row)
        if output is not None:
            append_rows(output, [asdict(row)], origin)

    rows = calibration.sweep(selectors, ratios, keep)
    proposal = propose(rows, tolerance)
    if proposal is None:
        click.echo(f"no policy stays within {tolerance:.0%}: use full prefill, or a higher --ratio")
        return
    fuse, row = proposal
    click.echo(f"proposed: {json.dumps(fuse.settings())}, at {row.cost:.1%} of the full prefill")
    click.echo(_confidence(row, tolerance))


def _questions(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{file} can't be read: {error}") from error
    # splitlines would also split at other characters
    return [line.strip() for line in text.split("\n") if line.strip()]


def _confidence(row: Any, tolerance: float) -> str:
    """A sentence with the agreement of the proposal and its 95 % interval."""
    from looseleaf_lab.evals.intervals import wilson

    same = round(row.agreement * row.questions)
    low, high = wilson(same, row.questions)
    sentence = (
        f"it agrees in {same} of {row.questions} questions, 95 % interval {low:.1%} to {high:.1%}"
    )
    if 1 - low > tolerance:
        sentence += f"; up to {1 - low:.1%} of answers may differ: give more questions to be surer"
    return sentence


def _show(row: Any) -> None:
    numbers = row.agreement, row.text_deviation, row.deviation_left, row.recomputed, row.cost
    agree, *percentages = (f"{number:.1%}" for number in numbers)
    settings = [row.selector, row.ratio and f"ratio {row.ratio:g}"]
    settings += [row.watched_share and f"last {row.watched_share:.3g}"]
    settings += [row.check_layers and f"layer {row.check_layers}"]
    click.echo(_line(", ".join(filter(None, settings)), agree, f"{row.kl:.4f}", *percentages))


def _line(policy: str, *columns: str) -> str:
    return policy.ljust(34) + "".join(column.rjust(9) for column in columns)
