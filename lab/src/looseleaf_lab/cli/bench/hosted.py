"""``looseleaf bench hosted``: time per token with a host-resident document."""

from pathlib import Path
from typing import Any

import click

from looseleaf_lab.cli.bench.report import OUTPUT, bench_progress, collect


@click.command()
@click.option("--shape", default="llama-3.1-8b", show_default=True, help="shape of the model")
@click.option("--layers", type=int, help="layers of the model [default: the shape's]")
@click.option(
    "--layer",
    type=click.Choice(["clustered", "unclustered"]),
    default="clustered",
    show_default=True,
    help="kind of synthetic keys and queries",
)
@click.option(
    "--context", "contexts", multiple=True, type=int, help="tokens of the document [default: 16384]"
)
@click.option(
    "--index", "kinds", multiple=True,
    type=click.Choice([kind + keys for keys in ("", "-int8") for kind in ("flat", "ivf", "graph")]),
    help="indexes to measure [default: those over unquantized keys]",
)  # fmt: skip
@click.option(
    "--window", "windows", multiple=True, type=click.IntRange(1, 9),
    help="revised rows of an output, with the newest [default: 1]",
)  # fmt: skip
@click.option("--dense/--no-dense", default=True, help="also measure with all keys in the pool")
@click.option("--distinct", default=8, show_default=True, help="distinct KV heads")
@click.option(
    "--copies", default=32, show_default=True, help="layers with separate memory; others share it"
)
@click.option("--found", "count", default=100, show_default=True, help="keys per query head")
@click.option("--recall", default=0.95, show_default=True, help="recall of every index")
@click.option("--sample", default=0.2, show_default=True, help="build queries per key")
@click.option("--threads", default=16, show_default=True, help="host threads")
@click.option("--new-tokens", default=8, show_default=True, help="timed tokens per run")
@click.option("--repetitions", default=5, show_default=True)
@OUTPUT
def hosted(
    layers: int | None,
    contexts: tuple[int, ...],
    kinds: tuple[str, ...],
    windows: tuple[int, ...],
    output: Path | None,
    **options: Any,
) -> None:
    """Time per token with a host-resident document, by kind of index, against dense decoding."""
    from looseleaf_lab.bench.hosted import HostedBench, measure
    from looseleaf_lab.bench.model_shapes import model_shape
    from looseleaf_lab.bench.results import show_table

    bench = HostedBench(
        contexts=contexts or (16384,),
        kinds=kinds or ("flat", "ivf", "graph"),
        windows=windows or (1,),
        num_layers=layers or model_shape(options["shape"]).num_layers,
        **options,
    )

    with bench_progress(bench, "cuda") as progress:
        rows = collect(measure(bench, progress), _summarize, output, "hosted")
    columns = ["context", "arm", "recall", "scanned", "effort", "token_ms", "search_ms"]
    columns += ["pool_gib", "device_gib", "host_gib", "build_s", "bytes_per_token"]
    columns += ["pays_after_tokens"]
    title = f"hosted, {bench.shape}, {bench.num_layers} layers, {bench.layer}"
    show_table(rows, title, columns)


def _summarize(row: Any) -> str:
    return (
        f"{row['context']} tokens, {row['arm']}: {row['token_ms']:.2f} ms a token, "
        f"{row['search_ms']:.2f} searching, recall {row['recall']:.3f}"
    )
