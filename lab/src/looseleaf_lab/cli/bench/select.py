"""``looseleaf bench select``: decoding under a select policy, against dense decoding."""

from pathlib import Path
from typing import Any

import click

from looseleaf_lab.cli.bench.report import DEVICE, OUTPUT, bench_progress, collect


@click.command()
@click.option(
    "--shape", default="small", show_default=True, help="shape of the random model: tiny, small, "
    "llama-3.1-8b"
)  # fmt: skip
@click.option("--budget", default=2048, show_default=True, help="maximal tokens that a row reads")
@click.option(
    "--context", "contexts", multiple=True, type=int, help="tokens before each row [default: 8192]"
)
@click.option("--batch", "batches", multiple=True, type=int, help="batch sizes [default: 1]")
@click.option(
    "--window",
    "windows",
    multiple=True,
    type=int,
    help="rows of an output that are revised together [default: none]",
)
@click.option(
    "--served",
    multiple=True,
    type=int,
    help="layers that one choice of pages serves; may be repeated [default: 1]",
)
@click.option("--new-tokens", default=16, show_default=True, help="timed tokens")
@click.option("--repetitions", default=5, show_default=True)
@DEVICE
@OUTPUT
def select(
    shape: str,
    budget: int,
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    windows: tuple[int, ...],
    device: str,
    output: Path | None,
    **sizes: Any,
) -> None:
    """One layer's attention and a whole token: dense, with selection, with one choice of pages for
    several layers, and with revision."""
    from looseleaf.config import Select
    from looseleaf.llm.load import pick_device
    from looseleaf_lab.bench.results import show_table
    from looseleaf_lab.bench.select import SelectBench, measure

    bench = SelectBench(
        shape,
        Select("quest", tokens=budget, dense_below=0),
        contexts or (8192,),
        batches or (1,),
        windows or (1,),
        device=pick_device(device),
        **sizes,
    )
    with bench_progress({"budget": budget} | vars(bench), bench.device) as progress:
        rows = collect(measure(bench, progress), _summarize, output, "select")
    columns = ["what", "context", "batch", "arm", "ms", "speedup", "mb"]
    show_table(rows, f"quest, {budget} tokens, {shape}", columns)


def _summarize(row: Any) -> str:
    label = f"{row['what']}, {row['context']} tokens, batch {row['batch']}, {row['arm']}"
    return f"{label}: {float(row['ms']):.4g} ms"
