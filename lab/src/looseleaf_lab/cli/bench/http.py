"""``looseleaf bench http``: load for an OpenAI endpoint."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.bench.report import DEVICE, OUTPUT, bench_progress, collect

if TYPE_CHECKING:
    from looseleaf_lab.bench.endpoint.workload import Endpoint, Prompt
    from looseleaf_lab.bench.progress import Progress


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
@click.option("--timeout", default=600.0, show_default=True, help="seconds of a request")
@OUTPUT
def http(url: str | None, shape: str | None, device: str, output: Path | None, **o: Any) -> None:
    """First tokens, time per token, gaps and errors of an OpenAI endpoint under load."""
    from looseleaf_lab.bench.endpoint.own_server import own_server
    from looseleaf_lab.bench.results import show_table

    if (url is None) == (shape is None):
        raise InvalidOption("give a URL or --self SHAPE")
    if o["speed"] <= 0 or o["timeout"] <= 0 or any(rate <= 0 for rate in o["rates"]):
        raise InvalidOption("--speed, --timeout and --rate must be positive")
    if o["trace"] and o["rates"]:
        raise InvalidOption("give --trace or --rate, not both")
    _streams(o["streams"])
    server = nullcontext(url) if shape is None else own_server(shape, device)
    sizes = {name: value for name, value in o.items() if name != "api_key"}
    with bench_progress(sizes, device if shape else "remote") as progress:
        progress.stage("the server" if shape else "the endpoint")
        with server as address:
            label = f"{shape}, random" if shape else str(url)
            rows = collect(_measure(str(address), label, o, progress), _summary, output, "http")
    columns = (
        "load", "complete", "first_token_p50_ms", "first_token_p99_ms", "per_token_p50_ms",
        "gap_p50_ms", "gap_p99_ms", "gap_max_ms", "tokens_per_s", "errors",
    )  # fmt: skip
    show_table(rows, f"http: {label}", columns)


def _measure(url: str, label: str, o: dict[str, Any], progress: "Progress") -> Iterator[Any]:
    """A row per load; registered documents are deleted afterwards."""
    from looseleaf_lab.bench.endpoint.discovery import delete, register

    endpoint, ratio = asyncio.run(_discover(url, o))
    loads = list(_loads(o, ratio))
    texts = sorted({text for _, _, prompts in loads for p in prompts for text in p.documents})
    if endpoint.documents_as == "id" and texts:
        progress.stage(f"registering {len(texts)} documents")
        endpoint = asyncio.run(register(endpoint, texts, o["timeout"]))
    try:
        yield from _run(endpoint, label, o, loads, len(texts), progress)
    finally:
        asyncio.run(delete(endpoint, o["timeout"]))


def _run(
    endpoint: "Endpoint",
    label: str,
    o: dict[str, Any],
    loads: "list[tuple[str, int, list[Prompt]]]",
    documents: int,
    progress: "Progress",
) -> Iterator[Any]:
    """A row per load; warns if a client process is busy."""
    from looseleaf_lab.bench.endpoint.figures import summarize
    from looseleaf_lab.bench.endpoint.load import BUSY, run_load, split

    clients = o["clients"] or max(1, (os.cpu_count() or 2) // 2)
    for name, streams, prompts in progress.over(loads, lambda load: load[0]):
        shares = split(endpoint, prompts, streams, clients, o["timeout"])
        outcome = run_load(shares)
        if outcome.cpu_share > BUSY:
            click.echo(
                f"warning: a client process used {outcome.cpu_share:.0%} of a core, so the clients "
                "may limit these figures: give more --clients, or another machine",
                err=True,
            )
        yield {
            "target": label,
            "model": endpoint.model,
            "api": endpoint.kind,
            "load": name,
            "clients": len(shares),
            "input": "trace" if o["trace"] else o["input_tokens"],
            "output": "trace" if o["trace"] else o["output_tokens"],
            "documents": documents,
            "documents_as": endpoint.documents_as if documents else "none",
            **summarize(outcome.answers),
            "client_cpu_share": outcome.cpu_share,
        }


async def _discover(url: str, o: dict[str, Any]) -> "tuple[Endpoint, float]":
    """The endpoint, and the words of a token."""
    from looseleaf_lab.bench.endpoint.discovery import find_model, has_documents, words_per_token
    from looseleaf_lab.bench.endpoint.workload import Endpoint

    timeout, form = o["timeout"], o["documents_as"]
    endpoint = Endpoint(url, o["model"] or "", o["api_key"], o["api"], "text", o["ignore_eos"])
    if not endpoint.model:
        endpoint = replace(endpoint, model=await find_model(endpoint, timeout))
    if form == "auto":
        form = "field" if await has_documents(endpoint, timeout) else "text"
    return replace(endpoint, documents_as=form), await words_per_token(endpoint, timeout)


def _loads(o: dict[str, Any], ratio: float) -> "Iterator[tuple[str, int, list[Prompt]]]":
    """Name, streams (0: open loop) and prompts of each load."""
    from looseleaf_lab.bench.endpoint.trace import read_trace, trace_prompts
    from looseleaf_lab.bench.endpoint.workload import Span, make_prompts, words

    if o["trace"]:
        with o["trace"].open(encoding="utf-8") as file:
            trace = read_trace(file, o["trace"].name)
        yield f"trace at speed {o['speed']:g}", 0, trace_prompts(trace, o["speed"], ratio)
        return
    lengths = Span.parse(o["input_tokens"]), Span.parse(o["output_tokens"])
    size = max(1, round(o["document_tokens"] * ratio))
    documents = [words(f"document {n}", size) for n in range(o["documents"] or 0)]
    if o["rates"]:
        from looseleaf_lab.bench.arrivals import poisson_arrivals

        for seed, rate in enumerate(o["rates"]):
            number = o["requests"] or 64
            prompts = make_prompts(number, lengths, documents, o["per_request"], ratio, seed)
            arrivals = poisson_arrivals(rate, number, seed)
            timed = [replace(p, at=at) for p, at in zip(prompts, arrivals, strict=True)]
            yield f"{rate:g} requests/s", 0, timed
        return
    for seed, streams in enumerate(_streams(o["streams"])):
        number = o["requests"] or max(32, 4 * streams)
        yield (
            f"{streams} streams",
            streams,
            make_prompts(number, lengths, documents, o["per_request"], ratio, seed),
        )


def _streams(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InvalidOption(f"--streams is a list of positive numbers such as 1,16, not {text!r}")
    return [int(part) for part in parts]


def _summary(row: Any) -> str:
    return (
        f"{row['load']}: {row['tokens_per_s']:.0f} tokens/s, first token "
        f"{row['first_token_p50_ms']:.1f} ms, errors {row['errors']}"
    )
