"""``looseleaf bench hits``, ``relay``, ``lazy`` and ``rate``: claims of papers on sharing and
blending."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from looseleaf.cli.options import explicit_options
from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.bench.report import DEVICE, OUTPUT, bench_progress, collect, report


@click.command()
@click.option("--budget", "budgets", multiple=True, type=float, help="GB [default: 1, 10, 50]")
@click.option("--alpha", "alphas", multiple=True, type=float, help="[default: 1.1, 1.5, 2.1]")
@click.option("--documents", default=1000, show_default=True, help="documents in the world")
@click.option("--document-tokens", default=512, show_default=True)
@click.option("--per-request", default=5, show_default=True, help="documents per request")
@click.option("--requests", default=2000, show_default=True, help="the first fifth fills the cache")
@click.option("--kib-per-token", default=128.0, show_default=True, help="of keys and values")
@click.option("--ragged", is_flag=True, help="documents of different lengths")
@OUTPUT
def hits(
    budgets: tuple[float, ...], alphas: tuple[float, ...], output: Path | None, **sizes: Any
) -> None:
    """Hit ratios of documents stored once, once per position, or as prefixes (LazyAttention).

    Without --budget and --alpha, also measures the case of the closed form: 20 positions and room
    for 100 documents, with a predicted 2.86 times the hits."""
    from looseleaf_lab.bench.hits import HitsConfig, gain_in_closed_form, measure

    if min(sizes["documents"], sizes["document_tokens"] - 1, sizes["per_request"]) < 1:
        raise InvalidOption("--documents, --document-tokens and --per-request must be positive")
    if sizes["per_request"] > sizes["documents"] or sizes["requests"] < 10:
        raise InvalidOption(
            "--documents must be at least --per-request, and --requests at least 10"
        )
    config = HitsConfig(skipped=sizes["requests"] // 5, **sizes)
    sizes_gb, skews = budgets or (1.0, 10.0, 50.0), alphas or (1.1, 1.5, 2.1)
    with bench_progress({"budgets": sizes_gb, "alphas": skews} | vars(config), "cpu") as progress:
        rows = list(measure(config, sizes_gb, skews, progress))
    if not budgets and not alphas:
        alpha, positions, room = 0.853, 20, 100
        wide = dataclasses.replace(config, per_request=positions, ragged=False)
        budget = room * config.document_tokens * config.kib_per_token / 2**20
        closed_form_rows = list(measure(wide, (budget,), (alpha,)))
        reused = {row["cache"]: float(row["reused"]) for row in closed_form_rows}
        click.echo(
            f"{positions} positions, room for {room} documents, alpha {alpha}: "
            f"{reused['once'] / reused['copies']:.2f} times the hits of copies per position; "
            f"closed form {gain_in_closed_form(room, positions, alpha):.2f}",
            err=True,
        )
        rows += closed_form_rows
    columns = ("alpha", "budget_gb", "documents_held", "cache", "reused", "closed_form", "paper")
    report(rows, "hits", columns, output, "hits")


@click.command()
@click.option("--shape", help="of the engines' model [default: llama-3.1-8b on a GPU, else small]")
@click.option("--prefix", "prefixes", multiple=True, type=int, help="[default: 64, 512, 2048]")
@click.option("--batch", "batches", multiple=True, type=int, help="rows of decode attention")
@click.option("--heads", type=(int, int, int), help="query heads, KV heads, head dim")
@click.option("--requests", type=int, help="requests per batch of the engines")
@click.option("--shots", multiple=True, type=int, help="examples before a question [1, 3, 5]")
@click.option("--rate-seconds", type=float, help="seconds of requests at each tried rate [0.7]")
@click.option("--repetitions", default=3, show_default=True)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["operator", "throughput", "few-shot", "rate"]),
    help="measure only this part; may be repeated",
)
@DEVICE
@OUTPUT
def relay(
    device: str,
    heads: tuple[int, int, int] | None,
    parts: tuple[str, ...],
    output: Path | None,
    **sizes: Any,
) -> None:
    """A prompt shared by all requests: attention, throughput, request rate (RelayAttention)."""
    from looseleaf.llm.load import pick_device
    from looseleaf_lab.bench.model_shapes import model_shape
    from looseleaf_lab.bench.relay import PARTS, RelayConfig, measure, small
    from looseleaf_lab.bench.results import show_table

    selected_device = pick_device(device)
    config = (
        small("cpu") if selected_device.type == "cpu" else RelayConfig(device=str(selected_device))
    )
    config = dataclasses.replace(config, **explicit_options(sizes))
    model_shape(config.shape)
    if heads is not None:
        query_heads, kv_heads, head_dim = heads
        if min(heads) < 1 or query_heads % kv_heads:
            raise InvalidOption("--heads must be positive, the first a multiple of the second")
        shape = dataclasses.replace(
            config.heads, num_qo_heads=query_heads, num_kv_heads=kv_heads, head_dim=head_dim
        )
        config = dataclasses.replace(config, heads=shape)
    if config.rate_seconds <= 0:
        raise InvalidOption("--rate-seconds must be positive")
    with bench_progress(config, selected_device) as progress:
        rows = collect(measure(config, parts or PARTS, progress), _figure, output, "relay")
    columns = (
        "measurement",
        "prefix",
        "batch",
        "arm",
        "unit",
        "median",
        "relay_faster",
        "predicted",
    )
    show_table(rows, "relay", columns)


@click.command()
@click.option("--shape", help="of the engine's model [default: llama-3.1-8b on a GPU, else small]")
@click.option("--alpha", "alphas", multiple=True, type=float, help="skew [default: 0, 2.1]")
@click.option("--documents", type=int, help="documents in the world")
@click.option("--document-tokens", type=int)
@click.option("--capacity", type=int, help="documents that the pool holds")
@click.option("--requests", type=int, help="requests in all, including those that fill the cache")
@click.option("--repetitions", default=3, show_default=True, help="of the breakdown")
@DEVICE
@OUTPUT
def lazy(device: str, output: Path | None, **sizes: Any) -> None:
    """First tokens, throughput and a breakdown, documents stored once or often (LazyAttention)."""
    from looseleaf.llm.load import pick_device
    from looseleaf_lab.bench.lazy import LazyConfig, measure, small
    from looseleaf_lab.bench.model_shapes import model_shape
    from looseleaf_lab.bench.results import show_table

    selected_device = pick_device(device)
    config = (
        small("cpu") if selected_device.type == "cpu" else LazyConfig(device=str(selected_device))
    )
    config = dataclasses.replace(config, **explicit_options(sizes))
    model_shape(config.shape)
    if config.documents < config.per_request or config.requests < 10:
        raise InvalidOption("--documents must be at least 5 and --requests at least 10")
    if config.document_tokens < 2:
        raise InvalidOption("--document-tokens must be at least 2")
    if min(config.alphas) < 0:
        raise InvalidOption("--alpha must be 0 (uniform) or more")
    config = dataclasses.replace(config, skipped=min(config.skipped, config.requests // 2))
    with bench_progress(config, selected_device) as progress:
        rows = collect(measure(config, progress), _figure, output, "lazy")
    columns = ("measurement", "alpha", "arm", "unit", "value", "once_faster", "paper")
    show_table(rows, f"lazy: {config.shape}", columns)


@click.command()
@click.option("--shape", help="of the engine's model [default: llama-3.1-8b on a GPU, else small]")
@click.option("--documents", type=int, help="documents in the world")
@click.option("--document-tokens", type=int)
@click.option("--per-request", type=int, help="documents of a request")
@click.option("--ratio", type=float, help="share of document tokens computed again [0.15]")
@click.option("--fuse", "selectors", multiple=True, help="[default: deviation, question]")
@click.option("--rate", "rates", multiple=True, type=float, help="requests/s [2 ... 128]")
@click.option("--arrivals", type=int, help="requests at each rate, at least [20]")
@click.option("--hold", type=float, help="minimal duration of each rate, in seconds [1]")
@click.option("--longest", type=float, help="maximal duration, to reach ten first tokens [4]")
@click.option("--repetitions", default=5, show_default=True, help="of a single first token")
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["rates", "sizes"]),
    help="measure only this part and single first tokens; may be repeated",
)
@DEVICE
@OUTPUT
def rate(device: str, parts: tuple[str, ...], output: Path | None, **sizes: Any) -> None:
    """First tokens while requests arrive, by policy for their documents (CacheBlend)."""
    from looseleaf.llm.load import pick_device
    from looseleaf_lab.bench.model_shapes import model_shape
    from looseleaf_lab.bench.rate import PARTS, RateConfig, measure, small
    from looseleaf_lab.bench.results import show_table

    selected_device = pick_device(device)
    config = (
        small("cpu") if selected_device.type == "cpu" else RateConfig(device=str(selected_device))
    )
    config = dataclasses.replace(config, **explicit_options(sizes))
    model_shape(config.shape)
    config.policies()
    if not 1 <= config.per_request <= config.documents:
        raise InvalidOption("--per-request must be from 1 to --documents")
    if min(config.rates) <= 0 or list(config.rates) != sorted(config.rates):
        raise InvalidOption("--rate must be positive and rise")
    if config.document_tokens < 16 or min(config.arrivals, config.repetitions) < 1:
        raise InvalidOption(
            "--document-tokens must be at least 16, --arrivals and --repetitions at least 1"
        )
    if not all(0 <= seconds < float("inf") for seconds in (config.hold, config.longest)):
        raise InvalidOption("--hold and --longest must be 0 seconds or more")
    with bench_progress(config, selected_device) as progress:
        rows = collect(measure(config, parts or PARTS, progress), _figure, output, "rate")
    columns = (
        "measurement",
        "per_request",
        "document_tokens",
        "arm",
        "rate",
        "unit",
        "value",
        "p95",
        "times_full",
    )
    show_table(rows, f"rate: {config.shape}", columns)


def _figure(row: Any) -> str:
    figure = row.get("value", row.get("median"))
    return f"{row['measurement']}, {row['arm']}: {figure:.4g} {row['unit']}"
