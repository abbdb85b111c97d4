"""``looseleaf bench http``: load for an OpenAI endpoint."""

from pathlib import Path
from typing import Any

import click

from looseleaf_lab.cli.bench.report import DEVICE, OUTPUT, bench_progress, collect


@click.command()
@click.argument("url", required=False)
@click.option("--self", "shape", help="serve a random model of this shape instead: tiny, ...")
@DEVICE
@click.option("--api", default="chat", type=click.Choice(["chat", "completions"]))
@click.option("--model", help="[default: the first of /v1/models]")
@click.option("--api-key", envvar="OPENAI_API_KEY", default="", help="bearer key")
@click.option("--clients", type=int, help="client processes [default: half of the cores]")
@click.option("--streams", default="1,16,64,256", show_default=True, help="closed loops")
@click.option("--rate", "rates", multiple=True, type=float, help="Poisson requests/s instead")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False, exists=True),
              help="replay a trace in Mooncake's JSONL form instead")  # fmt: skip
@click.option("--speed", default=1.0, show_default=True, help="of the trace's clock")
@click.option("--requests", type=int, help="per load [default: 4 per stream, at least 32]")
@click.option("--input-tokens", default="512", show_default=True, help="or a range: 100-900")
@click.option("--output-tokens", default="128", show_default=True, help="or a range")
@click.option("--documents", type=int, default=None, help="shared documents [default: none]")
@click.option("--document-tokens", default=1024, show_default=True)
@click.option("--per-request", default=3, show_default=True, help="documents per request")
@click.option(
    "--documents-as",
    default="auto",
    type=click.Choice(["auto", "text", "field", "id"]),
    help="text of the prompt, or Looseleaf's field [default: the field if the server has it]",
)
@click.option("--ignore-eos/--no-ignore-eos", default=False, help="where the server takes it")
@click.option("--entering", type=int, help="prompts that arrive at once beside the streams")
@click.option("--in-process/--no-in-process", default=False,
              help="also run the loads on the engine without a server (with --self)")  # fmt: skip
@click.option("--timeout", default=600.0, show_default=True, help="seconds of a request")
@OUTPUT
def http(output: Path | None, **options: Any) -> None:
    """First tokens, time per token, gaps and errors of an OpenAI endpoint under load."""
    from looseleaf.llm.load import pick_device
    from looseleaf_lab.bench.http import HttpOptions, measure
    from looseleaf_lab.bench.results import show_table

    config = HttpOptions(**options)
    sizes = {name: value for name, value in options.items() if name != "api_key"}
    device = pick_device(config.device) if config.shape else "remote, clients on this machine"
    with bench_progress(sizes, device) as progress:
        rows = collect(measure(config, _warn, progress), _summary, output, "http")
    columns = (
        "load", "first_token_p50_ms", "first_token_max_ms", "per_token_p50_ms", "gap_p99_ms",
        "gap_max_ms", "tokens_per_s", "errors",
    )  # fmt: skip
    show_table(rows, f"http: {config.label}", columns)


def _warn(sentence: str) -> None:
    click.echo(sentence, err=True)


def _summary(row: Any) -> str:
    return (
        f"{row['load']}: {row['tokens_per_s']:.0f} tokens/s, first token "
        f"{row['first_token_p50_ms']:.1f} ms, errors {row['errors']}"
    )
