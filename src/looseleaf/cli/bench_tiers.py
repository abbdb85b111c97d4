"""``looseleaf bench tiers``: the loading controller's choice against a sweep."""

import tempfile
from pathlib import Path

import click

from looseleaf.cli.bench_report import OUTPUT, report
from looseleaf.errors import InvalidOption


@click.command()
@click.option("--documents", default=4, show_default=True, help="documents of the prompt")
@click.option("--document-tokens", default=300, show_default=True, help="about how long each is")
@click.option("--repetitions", default=5, show_default=True)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="where the disk tier writes [default: the system's folder for temporary files]",
)
@OUTPUT
def tiers(
    documents: int, document_tokens: int, repetitions: int, folder: Path | None, output: Path | None
) -> None:
    """First token from documents on tiers of several speeds, on disk and in Redis, over ratios."""
    from looseleaf.bench.tiers import TierBench, measure
    from looseleaf.engine.loading import reference_model
    from looseleaf.evals.world import make_example

    if documents < 1 or document_tokens < 16 or repetitions < 1:
        raise InvalidOption("--documents, --document-tokens and --repetitions must be positive")
    config = TierBench(reference_model("causal"), "causal", repetitions=repetitions)
    examples = [make_example("lookup", seed) for seed in range(32 * documents)]
    texts = [
        # about four letters a token
        "\n".join(d for e in examples[n::documents] for d in e.documents)[: 4 * document_tokens]
        for n in range(documents)
    ]
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for row in measure(config, texts, examples[0].question, Path(scratch)):
            rows.append(row)
            said = f"{row['tier']}, {row['arm']}, {row['ratio']:.2f} from {row['loaded_from']}"
            click.echo(f"{said}: {1e3 * float(row['seconds']):.1f} ms", err=True)
    shown = ("tier", "arm", "ratio", "loaded_from", "seconds", "load_seconds", "total_predicted")
    report(rows, f"tiers: {config.name}", (*shown, "times_best"), output, "tiers")
