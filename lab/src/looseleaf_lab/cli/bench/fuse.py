"""``looseleaf bench fuse``: first tokens after documents in the pool, host memory or on disk."""

import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from looseleaf_lab.cli.bench.report import DEVICE, FOLDER, OUTPUT, bench_progress, collect


@click.command()
@click.option(
    "--shape", default="small", show_default=True, help="shape of the random model: tiny, small, "
    "llama-3.1-8b"
)  # fmt: skip
@DEVICE
@click.option("--documents", default=5, show_default=True, help="documents of a prompt")
@click.option("--document-tokens", default=4096, show_default=True)
@click.option("--question", default=64, show_default=True, help="tokens of the question")
@click.option(
    "--ratio", "ratios", multiple=True, type=float, help="recomputed shares [default: 0.15]"
)
@click.option("--place", "places", multiple=True, help="device, host, disk [default: all]")
@click.option("--selector", "selectors", multiple=True, help="[default: all with an arm]")
@click.option("--repetitions", default=5, show_default=True)
@click.option("--stored", default=14, show_default=True, help="documents of the sustained load")
@click.option("--batch", default=2, show_default=True, help="requests per batch of that load")
@click.option("--batches", default=22, show_default=True, help="batches of that load; 0: none")
@FOLDER
@OUTPUT
def fuse(
    device: str,
    places: tuple[str, ...],
    ratios: tuple[float, ...],
    selectors: tuple[str, ...],
    folder: Path | None,
    output: Path | None,
    **sizes: Any,
) -> None:
    """First token of reused documents under every fuse policy, against full prefill."""
    from looseleaf.llm.load import pick_device
    from looseleaf_lab.bench.fuse import PLACES, FuseBench, measure
    from looseleaf_lab.bench.results import show_table

    if selectors:
        sizes["selectors"] = selectors
    if ratios:
        sizes["ratios"] = ratios
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        config = FuseBench(
            device=pick_device(device), folder=Path(scratch), places=places or PLACES, **sizes
        )
        with bench_progress(config, config.device) as progress:
            rows = collect(measure(config, progress), _summarize, output, "fuse")
    columns = ("arm", "ratio", "place", "batch", "ms", "times_full", "load_ms", "over_slower")
    for measurement, measurement_rows in groupby(rows, lambda row: row["measurement"]):
        show_table([*measurement_rows], f"fuse, {measurement}: {rows[0]['model']}", columns)


def _summarize(row: Any) -> str:
    label = f"{row['measurement']} {row['batch'] or ''}, {row['arm']} {row['ratio'] or ''}"
    return f"{label} from {row['place']}: {float(row['ms']):.1f} ms"
