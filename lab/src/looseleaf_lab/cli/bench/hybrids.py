"""``looseleaf bench hybrids``: documents of models with linear layers, as affine maps of states."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.bench.report import OUTPUT, bench_progress, collect
from looseleaf_lab.errors import INSTALL


@click.command()
@click.option("--documents", default=3, show_default=True, help="documents behind the lead")
@click.option("--document-tokens", default=128, show_default=True, help="tokens of tiny models'")
@click.option("--head-tokens", default=1024, show_default=True, help="tokens for published heads")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["laws", "heads", "sizes"]),
    help="measure only this part; may be repeated",
)
@click.option("--family", "families", multiple=True, help="of tiny models; may be repeated")
@OUTPUT
def hybrids(
    parts: tuple[str, ...], families: tuple[str, ...], output: Path | None, **sizes: Any
) -> None:
    """Documents as maps of linear layers' states: errors, bytes and work.

    Models are tiny and random; sizes are those of published shapes."""
    if find_spec("transformers") is None:
        raise InvalidOption(f"the models need transformers: {INSTALL}")
    from looseleaf_lab.bench.hybrids import FAMILIES, PARTS, HybridsConfig, measure
    from looseleaf_lab.bench.results import show_table

    config = HybridsConfig(**sizes, parts=parts or PARTS, families=families or FAMILIES)
    with bench_progress(config, "cpu") as progress:
        rows = collect(measure(config, progress), _summarize, output, "hybrids")
    for part in dict.fromkeys(row["part"] for row in rows):
        table = _by_measurement([row for row in rows if row["part"] == part])
        show_table(table, f"hybrids: {part}", [*table[0]])


def _by_measurement(rows: list[Any]) -> list[dict[str, Any]]:
    """One row per measurement, one column per model."""
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        title = f"{row['measurement']}, {row['unit']}"
        table.setdefault(title, {"figure": title})[row["model"]] = row["value"]
    return [*table.values()]


def _summarize(row: Any) -> str:
    return f"{row['model']}, {row['measurement']}: {row['value']:.3g} {row['unit']}"
