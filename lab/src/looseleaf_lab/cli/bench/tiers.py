"""``looseleaf bench tiers``: the loading controller's choice against a sweep."""

import tempfile
from pathlib import Path
from typing import Any

import click

from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.bench.report import DEVICE, FOLDER, OUTPUT, collect, measuring


@click.command()
@click.option(
    "--shape",
    help="of a model with random weights instead of the reference model: small, llama-3.1-8b",
)
@DEVICE
@click.option("--documents", default=4, show_default=True, help="documents of the prompt")
@click.option("--document-tokens", default=300, show_default=True, help="about how long each is")
@click.option("--repetitions", default=5, show_default=True)
@FOLDER
@OUTPUT
def tiers(
    shape: str | None,
    device: str,
    documents: int,
    document_tokens: int,
    repetitions: int,
    folder: Path | None,
    output: Path | None,
) -> None:
    """First token from documents on tiers of several speeds, on disk and in Redis, over ratios."""
    from looseleaf.llm.load import pick_device, reference_model
    from looseleaf_lab.bench.random_model import model_shape
    from looseleaf_lab.bench.results import show_table
    from looseleaf_lab.bench.tiers import TierBench, measure, of_checkpoint, of_shape

    if documents < 2 or document_tokens < 16 or repetitions < 1:
        raise InvalidOption(
            "--documents must be at least 2 (of the first none is computed again), "
            "--document-tokens at least 16, --repetitions at least 1"
        )
    chosen = pick_device(device)
    # documents, the same again while they are computed, and a question
    pages = max(640, 2 * documents * (document_tokens // 12 + 1))
    space = 1 << 30
    if shape is None:
        make, name = of_checkpoint(reference_model("causal"), str(chosen), pages), "causal"
    else:
        # some more than the pool, at most four bytes a number
        model = model_shape(shape)
        per_token = 8 * model.num_layers * model.num_kv_heads * model.head_dim
        make, name = of_shape(shape, chosen, pages), f"{shape}, random"
        space = max(space, 16 * pages * per_token)
    config = TierBench(make, name, space, repetitions=repetitions)
    texts, question = _texts(documents, document_tokens)
    sizes = {"model": name, "documents": documents, "document tokens": document_tokens}
    sizes["repetitions"] = repetitions
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        measuring(sizes, chosen) as progress,
    ):
        measured = measure(config, texts, question, Path(scratch), progress)
        rows = collect(measured, _say, output, "tiers")
    shown = ("tier", "arm", "ratio", "loaded_from", "seconds", "load_seconds", "total_predicted")
    show_table(rows, f"tiers: {config.name}", (*shown, "times_best"))


def _texts(documents: int, tokens: int) -> tuple[list[str], str]:
    """Documents about so long, and a question."""
    from looseleaf_lab.evals.world import make_example

    # about four letters a token, and more than a thousand letters a world
    letters = 4 * tokens
    examples = [make_example("lookup", seed) for seed in range(documents * (letters // 1000 + 1))]
    texts = [
        "\n".join(d for e in examples[n::documents] for d in e.documents)[:letters]
        for n in range(documents)
    ]
    return texts, examples[0].question


def _say(row: Any) -> str:
    said = f"{row['tier']}, {row['arm']}, {row['ratio']:.2f} from {row['loaded_from']}"
    return f"{said}: {1e3 * float(row['seconds']):.1f} ms"
