"""``looseleaf bench index``: recall of vector indexes by share of compared keys."""

from pathlib import Path
from typing import Any

import click

from looseleaf_lab.cli.bench.report import OUTPUT, bench_progress, collect


@click.command()
@click.option(
    "--layer",
    "kinds",
    multiple=True,
    type=click.Choice(["clustered", "unclustered", "reference"]),
    help="[default: all three]",
)
@click.option("--index", "names", multiple=True, help="indexes to measure [default: all]")
@click.option(
    "--keys",
    default=65536,
    show_default=True,
    type=click.IntRange(min=1024),
    help="keys of a synthetic layer",
)
@click.option("--tokens", default=4096, show_default=True, help="prompt of the reference model")
@click.option("--queries", default=500, show_default=True, help="test queries")
@click.option("--seed", default=0, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="PNG to draw")
@OUTPUT
def index(
    kinds: tuple[str, ...],
    names: tuple[str, ...],
    keys: int,
    tokens: int,
    queries: int,
    seed: int,
    plot: Path | None,
    output: Path | None,
) -> None:
    """Recall of vector indexes by share of compared keys, against HNSW and RoarGraph."""
    from looseleaf.config import IndexConfig
    from looseleaf_lab.bench.index import measure
    from looseleaf_lab.bench.index_layers import reference_layers, synthetic_layer
    from looseleaf_lab.bench.index_plot import draw
    from looseleaf_lab.bench.results import show_table
    from looseleaf_lab.evals.world import make_example

    def layers() -> Any:
        for kind in kinds or ("clustered", "unclustered", "reference"):
            if kind == "reference":
                examples = [make_example("lookup", seed + n) for n in range(tokens // 256 + 1)]
                texts = [document for e in examples for document in e.documents]
                yield from reference_layers(texts, tokens, (0, 3, 7), queries, seed)
            else:
                yield synthetic_layer(kind, keys, queries, seed)

    def summarize(row: Any) -> str:
        return (
            f"{row['layer']}, {row['index']} {row['effort']}: recall {row['recall']:.3f}, "
            f"{100 * float(row['scanned']):.2f} % scanned"
        )

    sizes = {"layers": kinds, "indexes": names, "keys": keys, "tokens": tokens, "queries": queries}
    with bench_progress(sizes, "cpu") as progress:
        row_source = measure(layers(), IndexConfig(), names, progress)
        rows = collect(row_source, summarize, output, "index")
    columns = ("layer", "index", "effort", "recall", "scanned", "ms_per_query", "bytes_per_token")
    show_table(rows, "index: recall@100", columns)
    if plot is not None:
        draw(rows, plot)
