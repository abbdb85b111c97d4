"""``looseleaf bench agents``: discovery for agents' prompts, against prefix caching."""

from pathlib import Path
from typing import Any

import click

from looseleaf_lab.cli.bench.report import OUTPUT, bench_progress, collect


@click.command()
@click.option("--model", help="checkpoint or GGUF file [default: the reference model]")
@click.option("--turns", default=24, show_default=True, help="requests of each trace")
@click.option("--files", default=6, show_default=True, help="files that the agents read")
@click.option("--lines", default=40, show_default=True, help="lines of each file")
@click.option("--window", default=4, show_default=True, help="most files of one prompt")
@click.option("--skipped", default=8, show_default=True, help="first requests, not counted")
@click.option("--new-tokens", default=16, show_default=True, help="tokens of each answer")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--mooncake",
    type=click.Path(path_type=Path, exists=True),
    help="also the requests of this trace in Mooncake's form [default: none]",
)
@OUTPUT
def agents(
    model: str | None,
    skipped: int,
    new_tokens: int,
    mooncake: Path | None,
    output: Path | None,
    **sizes: int,
) -> None:
    """Tokens reused exactly and out of context, first token, and agreement with exact answers."""
    from looseleaf.errors import InvalidOption
    from looseleaf.llm.load import find_model, pick_device, reference_model
    from looseleaf_lab.bench.agent_traces import TraceConfig
    from looseleaf_lab.bench.agents import AgentsConfig, measure
    from looseleaf_lab.bench.results import show_table

    if not 0 <= skipped < sizes["turns"]:
        raise InvalidOption("--skipped must be less than --turns: the rest is counted")
    folder = find_model(model) if model else reference_model()
    name = Path(model).name if model else "reference"
    config = AgentsConfig(folder, name, TraceConfig(**sizes), mooncake, skipped, new_tokens)
    with bench_progress({"model": name} | sizes, pick_device("auto")) as progress:
        rows = collect(measure(config, progress), _summarize, output, "agents")
    columns = ["trace", "arm", "exact", "out_of_context", "times_sooner", "same_tokens"]
    show_table(rows, f"agents: {name}", columns)


def _summarize(row: Any) -> str:
    reused = float(row["exact"]) + float(row["out_of_context"])
    return f"{row['trace']}, {row['arm']}: {reused:.0%} reused, {row['times_sooner']:.1f} x sooner"
