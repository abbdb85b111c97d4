"""``looseleaf bench select``: decoding under a select policy beside dense decoding."""

from pathlib import Path

import click

from looseleaf.cli.bench_report import OUTPUT, report


@click.command()
@click.option(
    "--shape", default="small", show_default=True, help="shape of the random model: tiny, small, "
    "llama-3.1-8b"
)  # fmt: skip
@click.option("--budget", default=2048, show_default=True, help="tokens that a row reads at most")
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
@click.option("--new-tokens", default=16, show_default=True, help="tokens that are timed")
@click.option("--repetitions", default=5, show_default=True)
@OUTPUT
def select(
    shape: str,
    budget: int,
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    windows: tuple[int, ...],
    new_tokens: int,
    repetitions: int,
    output: Path | None,
) -> None:
    """One layer's attention and a whole token, dense, under a policy, and revised."""
    import torch

    from looseleaf.bench.results import Row
    from looseleaf.bench.select import SelectBench, measure
    from looseleaf.config import Select

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = SelectBench(
        shape,
        Select("quest", tokens=budget),
        contexts or (8192,),
        batches or (1,),
        windows or (1,),
        new_tokens,
        repetitions,
        device,
    )

    def say(row: Row) -> None:
        click.echo(
            f"{row['what']}, {row['context']} tokens, batch {row['batch']}, {row['arm']}: "
            f"{float(row['ms']):.4g} ms",
            err=True,
        )

    rows = measure(bench, say)
    shown = ["what", "context", "batch", "arm", "ms", "speedup", "mb"]
    report(rows, f"quest, {budget} tokens, {shape}", shown, output, "select")
