"""``looseleaf bench hosted``: a token behind a document in the host's memory."""

from pathlib import Path
from typing import Any

import click

from looseleaf_lab.cli.bench.report import OUTPUT, collect, measuring


@click.command()
@click.option("--shape", default="llama-3.1-8b", show_default=True, help="shape of the model")
@click.option("--layers", type=int, help="layers of the model [default: the shape's]")
@click.option(
    "--layer",
    type=click.Choice(["clustered", "unclustered"]),
    default="clustered",
    show_default=True,
    help="what keys and queries are made like",
)
@click.option(
    "--context", "contexts", multiple=True, type=int, help="tokens of the document [default: 16384]"
)
@click.option(
    "--index", "kinds", multiple=True,
    type=click.Choice([kind + keys for keys in ("", "-int8") for kind in ("flat", "ivf", "graph")]),
    help="indexes to measure [default: those that compare the keys themselves]",
)  # fmt: skip
@click.option(
    "--window", "windows", multiple=True, type=click.IntRange(1, 9),
    help="rows of an output that are revised, the newest among them [default: 1]",
)  # fmt: skip
@click.option("--dense/--no-dense", default=True, help="beside all keys in the GPU's pool")
@click.option("--distinct", default=8, show_default=True, help="KV heads that are made apart")
@click.option(
    "--copies", default=32, show_default=True, help="layers with memory of their own; others share"
)
@click.option("--found", default=100, show_default=True, help="keys that a query head finds")
@click.option("--recall", default=0.95, show_default=True, help="recall that every index reaches")
@click.option("--sample", default=0.2, show_default=True, help="queries to learn from, by key")
@click.option("--threads", default=16, show_default=True, help="threads of the host")
@click.option("--new-tokens", default=8, show_default=True, help="tokens that are timed in a run")
@click.option("--repetitions", default=5, show_default=True)
@OUTPUT
def hosted(
    layers: int | None,
    contexts: tuple[int, ...],
    kinds: tuple[str, ...],
    windows: tuple[int, ...],
    found: int,
    output: Path | None,
    **options: Any,
) -> None:
    """Time of a token behind a hosted document, by kind of index, beside dense decoding."""
    from looseleaf_lab.bench.hosted import HostedBench, measure
    from looseleaf_lab.bench.random_model import model_shape
    from looseleaf_lab.bench.results import show_table

    bench = HostedBench(
        contexts=contexts or (16384,),
        kinds=kinds or ("flat", "ivf", "graph"),
        windows=windows or (1,),
        num_layers=layers or model_shape(options["shape"]).num_layers,
        count=found,
        **options,
    )

    with measuring(bench, "cuda") as progress:
        rows = collect(measure(bench, progress), _say, output, "hosted")
    shown = ["context", "arm", "recall", "scanned", "effort", "token_ms", "search_ms"]
    shown += ["pool_gib", "device_gib", "host_gib", "build_s", "bytes_per_token"]
    shown += ["pays_after_tokens"]
    title = f"hosted, {bench.shape}, {bench.num_layers} layers, {bench.layer}"
    show_table(rows, title, shown)


def _say(row: Any) -> str:
    return (
        f"{row['context']} tokens, {row['arm']}: {row['token_ms']:.2f} ms a token, "
        f"{row['search_ms']:.2f} searching, recall {row['recall']:.3f}"
    )
