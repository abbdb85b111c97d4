"""``looseleaf bench tiers``: the loading controller against a sweep of ratios."""

import tempfile
from pathlib import Path
from typing import Any

import click

from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.bench.report import DEVICE, FOLDER, OUTPUT, bench_progress, collect


@click.command()
@click.option(
    "--shape",
    help="shape of a random model, instead of the reference model: small, llama-3.1-8b",
)
@DEVICE
@click.option("--documents", default=4, show_default=True, help="documents of the prompt")
@click.option("--document-tokens", default=300, show_default=True, help="approximate length")
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
    """First tokens of documents on tiers of several speeds, disk and Redis, by recomputed ratio."""
    from looseleaf.llm.load import pick_device, reference_model
    from looseleaf_lab.bench.model_shapes import model_shape
    from looseleaf_lab.bench.results import show_table
    from looseleaf_lab.bench.tiers import TierBench, measure, of_checkpoint, of_shape

    if documents < 2 or document_tokens < 16 or repetitions < 1:
        raise InvalidOption(
            "--documents must be at least 2 (the first one is never recomputed), "
            "--document-tokens at least 16, --repetitions at least 1"
        )
    selected_device = pick_device(device)
    # documents, the same again during recompute, and a question
    pages = max(640, 2 * documents * (document_tokens // 12 + 1))
    space = 1 << 30
    if shape is None:
        make, name = of_checkpoint(reference_model("causal"), str(selected_device), pages), "causal"
    else:
        # more than the pool, at four bytes per number
        model = model_shape(shape)
        per_token = 8 * model.num_layers * model.num_kv_heads * model.head_dim
        make, name = of_shape(shape, selected_device, pages), f"{shape}, random"
        space = max(space, 16 * pages * per_token)
    config = TierBench(make, name, space, repetitions=repetitions)
    texts, question = _texts(documents, document_tokens)
    sizes = {"model": name, "documents": documents, "document tokens": document_tokens}
    sizes["repetitions"] = repetitions
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        bench_progress(sizes, selected_device) as progress,
    ):
        row_source = measure(config, texts, question, Path(scratch), progress)
        rows = collect(row_source, _summarize, output, "tiers")
    columns = ("tier", "arm", "ratio", "loaded_from", "seconds", "load_seconds", "total_predicted")
    show_table(rows, f"tiers: {config.name}", (*columns, "times_best"))


def _texts(documents: int, tokens: int) -> tuple[list[str], str]:
    """Documents of about ``tokens`` tokens, and a question."""
    from looseleaf_lab.evals.world import make_example

    # about four letters per token, and more than a thousand letters per world
    letters = 4 * tokens
    examples = [make_example("lookup", seed) for seed in range(documents * (letters // 1000 + 1))]
    texts = [
        "\n".join(d for e in examples[n::documents] for d in e.documents)[:letters]
        for n in range(documents)
    ]
    return texts, examples[0].question


def _summarize(row: Any) -> str:
    label = f"{row['tier']}, {row['arm']}, {row['ratio']:.2f} from {row['loaded_from']}"
    return f"{label}: {1e3 * float(row['seconds']):.1f} ms"
