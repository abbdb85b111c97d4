"""``looseleaf bench select``: decoding under a select policy beside dense decoding."""

from pathlib import Path
from typing import get_args

import click

from looseleaf.cli.bench_report import OUTPUT, report
from looseleaf.config import SelectPolicy


@click.command()
@click.option(
    "--shape", default="small", show_default=True, help="shape of the random model: tiny, small, "
    "llama-3.1-8b"
)  # fmt: skip
@click.option(
    "--policy",
    type=click.Choice([p for p in get_args(SelectPolicy) if p not in ("all", "retrieval")]),
    default="quest",
    show_default=True,
)
@click.option("--budget", default=2048, show_default=True, help="tokens that a row reads at most")
@click.option(
    "--context", "contexts", multiple=True, type=int, help="tokens before each row [default: 8192]"
)
@click.option("--batch", "batches", multiple=True, type=int, help="batch sizes [default: 1]")
@click.option("--new-tokens", default=16, show_default=True, help="tokens that are timed")
@click.option("--repetitions", default=5, show_default=True)
@OUTPUT
def select(
    shape: str,
    policy: SelectPolicy,
    budget: int,
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    new_tokens: int,
    repetitions: int,
    output: Path | None,
) -> None:
    """One layer's attention, and a whole token, dense and under a policy."""
    import torch

    from looseleaf.bench.results import Row
    from looseleaf.bench.select import SelectBench, measure
    from looseleaf.config import Select

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = SelectBench(
        shape,
        Select(policy, tokens=budget),
        contexts or (8192,),
        batches or (1,),
        new_tokens,
        repetitions,
        device,
    )

    def say(row: Row) -> None:
        click.echo(f"{row['what']}, {row['context']} tokens", err=True)

    rows = measure(bench, say)
    shown = ["what", "context", "batch", "dense_ms", "select_ms", "speedup"]
    shown += ["dense_mb", "select_mb"]
    report(rows, f"{policy}, {budget} tokens, {shape}", shown, output, "select")
