"""``looseleaf bench tensor-parallel``: one GPU against several."""

from pathlib import Path
from typing import Any

import click

from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.bench.report import OUTPUT, bench_progress, collect


@click.command("tensor-parallel")
@click.option("--shape", default="llama-3.1-8b", show_default=True, help="shape of a random model")
@click.option("--device", default="auto", show_default=True, help="cpu or cuda")
@click.option(
    "--ranks",
    multiple=True,
    type=click.IntRange(1),
    help="number of ranks, the baseline first; may be repeated [default: 1 and 2]",
)
@click.option(
    "--quantize", type=click.Choice(["fp8", "int8", "int4"]), help="matrices of layers on GPUs"
)
@click.option(
    "--all-reduce", type=click.Choice(["auto", "nccl"]), default="nccl", show_default=True
)
@click.option("--batch", "batches", multiple=True, type=int, help="batch sizes [default: 1 and 64]")
@click.option("--prompt-tokens", default=256, show_default=True, help="prompts of decode")
@click.option("--prefill-tokens", default=20_000, show_default=True)
@click.option("--document-tokens", default=4000, show_default=True, help="of each of 5 documents")
@click.option("--steps", default=64, show_default=True, help="decode steps per repetition")
@click.option("--repetitions", default=5, show_default=True)
@click.option("--memory-gib", type=float, help="pool of each rank [default: the free memory]")
@OUTPUT
def tensor_parallel(
    device: str,
    ranks: tuple[int, ...],
    batches: tuple[int, ...],
    output: Path | None,
    **sizes: Any,
) -> None:
    """Decode, prefill and first token by the number of ranks that share a model."""
    from looseleaf.llm.load import pick_device
    from looseleaf_lab.bench.results import show_table
    from looseleaf_lab.bench.tensor_parallel import RanksConfig, measure

    if min(*batches, sizes["steps"], sizes["repetitions"], 1) < 1:
        raise InvalidOption("--batch, --steps and --repetitions must be at least 1")
    selected = pick_device(device)
    config = RanksConfig(ranks=ranks or (1, 2), batches=batches or (1, 64), **sizes)
    with bench_progress(config, selected) as progress:
        rows = collect(measure(config, selected, progress), _summarize, output, "tensor_parallel")
    columns = ("work", "ranks", "seconds", "least", "most", "times_one", "weight_gib")
    show_table(rows, f"tensor parallelism: {config.shape}", columns)


def _summarize(row: Any) -> str:
    factor = f"{row['times_one']:.2f} x"
    return f"{row['work']}, {row['ranks']} ranks: {1e3 * float(row['seconds']):.3f} ms, {factor}"
