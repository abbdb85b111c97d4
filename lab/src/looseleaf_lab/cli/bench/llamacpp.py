"""``looseleaf bench llamacpp``: GGUF files beside llama.cpp."""

from pathlib import Path
from typing import Any

import click

from looseleaf_lab.cli.bench.report import OUTPUT, bench_progress, collect


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--form",
    "forms",
    multiple=True,
    type=click.Choice(["as it is", "BF16", "F16", "Q8_0", "Q4_0"]),
    help="quantize the file again by llama.cpp; may be repeated [default: as it is]",
)
@click.option("--threads", multiple=True, type=int, help="may be repeated [default: 1 and 2]")
@click.option("--repetitions", default=5, show_default=True)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["decode", "batch", "prefill", "documents", "start"]),
    help="measure only this part; may be repeated",
)
@OUTPUT
def llamacpp(
    models: tuple[Path, ...],
    forms: tuple[str, ...],
    threads: tuple[int, ...],
    repetitions: int,
    parts: tuple[str, ...],
    output: Path | None,
) -> None:
    """Decode, prefill, documents, start and memory beside llama.cpp, on idle cores."""
    from looseleaf_lab.bench.llamacpp import AS_IS, PARTS, LlamaCppConfig, measure
    from looseleaf_lab.bench.results import show_table

    config = LlamaCppConfig(
        models, forms or (AS_IS,), threads or (1, 2), repetitions, parts or PARTS
    )
    with bench_progress(config, "cpu") as progress:
        rows = collect(measure(config, progress), _summary, output, "llamacpp")
    columns = (
        "model", "form", "threads", "measurement", "unit", "looseleaf", "llamacpp",
        "times_better", "share_of_read", "share_of_read_llamacpp",
    )  # fmt: skip
    if rows:
        show_table(rows, "llama.cpp", columns)


def _summary(row: Any) -> str:
    return (
        f"{row['form']}, {row['threads']} threads, {row['measurement']}: {row['looseleaf']:.4g} "
        f"{row['unit']}, llama.cpp {row['llamacpp']:.4g}: {row['times_better']:.2f} x"
    )
