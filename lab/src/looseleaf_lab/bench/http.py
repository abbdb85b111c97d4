"""``bench http``: closed loops, Poisson arrivals or a trace over an OpenAI endpoint."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from looseleaf import LLM
from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.arrivals import poisson_arrivals
from looseleaf_lab.bench.checkpoints import write_random_checkpoint
from looseleaf_lab.bench.endpoint.discovery import (
    delete,
    find_model,
    has_documents,
    register,
    words_per_token,
)
from looseleaf_lab.bench.endpoint.figures import summarize
from looseleaf_lab.bench.endpoint.in_process import run_in_process
from looseleaf_lab.bench.endpoint.load import BUSY, run_load, split
from looseleaf_lab.bench.endpoint.own_server import own_server
from looseleaf_lab.bench.endpoint.trace import read_trace, trace_prompts
from looseleaf_lab.bench.endpoint.workload import Endpoint, Kind, Prompt, Span, make_prompts, words
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.results import Row

Load = tuple[str, int, list[Prompt]]
"""Name, streams (0: open loop) and prompts."""

_ENTER_SECONDS = 2.0
"""Seconds after the start at which prompts enter beside the streams."""


@dataclass(frozen=True)
class HttpOptions:
    """An endpoint, or the shape of an own server's model, and its loads.

    ``streams`` has numbers and commas; ``rates`` (requests/s) or ``trace`` replace it. Raises
    InvalidOption for options that exclude each other."""

    url: str | None = None
    shape: str | None = None
    device: str = "auto"
    api: Kind = "chat"
    model: str | None = None
    api_key: str = ""
    clients: int | None = None
    streams: str = "1,16,64,256"
    rates: tuple[float, ...] = ()
    trace: Path | None = None
    speed: float = 1.0
    requests: int | None = None
    input_tokens: str = "512"
    output_tokens: str = "128"
    documents: int | None = None
    document_tokens: int = 1024
    per_request: int = 3
    documents_as: Literal["auto", "text", "field", "id"] = "auto"
    ignore_eos: bool = False
    entering: int | None = None
    in_process: bool = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if (self.url is None) == (self.shape is None):
            raise InvalidOption("give a URL or --self SHAPE")
        if self.speed <= 0 or self.timeout <= 0 or any(rate <= 0 for rate in self.rates):
            raise InvalidOption("--speed, --timeout and --rate must be positive")
        if self.trace and self.rates:
            raise InvalidOption("give --trace or --rate, not both")
        if (self.in_process or self.entering) and (self.trace or self.rates):
            raise InvalidOption("--in-process and --entering are for --streams only")
        if self.in_process and self.shape is None:
            raise InvalidOption("--in-process is for --self SHAPE only")
        parse_streams(self.streams)

    @property
    def label(self) -> str:
        """The name of the target in rows."""
        return f"{self.shape}, random" if self.shape else str(self.url)


def measure(
    o: HttpOptions, warn: Callable[[str], None], progress: Progress = SILENT
) -> Iterator[Row]:
    """A row per load. ``warn`` gets a sentence if a client process is busy.

    Raises InvalidOption for a bad option, and LooseleafError if the server does not answer."""
    if o.shape is None:
        progress.stage("the endpoint")
        yield from _loaded(str(o.url), o, warn, progress)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random_checkpoint(o.shape, Path(scratch) / o.shape)
        progress.stage("the server")
        with own_server(folder, o.device) as address:
            loads: list[Load] = []
            yield from _loaded(address, o, warn, progress, loads)
        if o.in_process:
            progress.stage("the engine in this process")
            yield from _in_process(folder, o, loads)


def _loaded(
    url: str,
    o: HttpOptions,
    warn: Callable[[str], None],
    progress: Progress,
    used: list[Load] | None = None,
) -> Iterator[Row]:
    """The rows; registered documents are deleted afterwards. ``used`` gets the loads."""
    endpoint, ratio = asyncio.run(_discover(url, o))
    loads = list(_loads(o, ratio))
    if used is not None:
        used += loads
    texts = sorted({text for _, _, prompts in loads for p in prompts for text in p.documents})
    if endpoint.documents_as == "id" and texts:
        progress.stage(f"registering {len(texts)} documents")
        endpoint = asyncio.run(register(endpoint, texts, o.timeout))
    try:
        yield from _run(endpoint, o, loads, len(texts), warn, progress)
    finally:
        asyncio.run(delete(endpoint, o.timeout))


def _run(
    endpoint: Endpoint,
    o: HttpOptions,
    loads: list[Load],
    documents: int,
    warn: Callable[[str], None],
    progress: Progress,
) -> Iterator[Row]:
    """A row per load, as it ends."""

    clients = o.clients or max(1, (os.cpu_count() or 2) // 2)
    for name, streams, prompts in progress.over(loads, lambda load: load[0]):
        shares = split(endpoint, prompts, streams, clients, o.timeout)
        outcome = run_load(shares)
        if outcome.cpu_share > BUSY:
            warn(
                f"warning: a client process used {outcome.cpu_share:.0%} of a core, so the clients "
                "may limit these figures: give more --clients, or another machine"
            )
        yield {
            "target": o.label,
            "model": endpoint.model,
            "api": endpoint.kind,
            "load": name,
            "clients": len(shares),
            "input": "trace" if o.trace else o.input_tokens,
            "output": "trace" if o.trace else o.output_tokens,
            "documents": documents,
            "documents_as": endpoint.documents_as if documents else "none",
            **summarize(outcome.answers),
            "client_cpu_share": outcome.cpu_share,
        }


def _in_process(folder: Path, o: HttpOptions, loads: list[Load]) -> Iterator[Row]:
    """The rows of the same loads on an engine of this process."""
    with LLM(folder, device=o.device) as llm:
        llm.engine.runner.warm_up()
        for name, streams, prompts in loads:
            answers = run_in_process(llm, prompts, streams)
            yield {
                "target": o.label,
                "model": o.shape or "",
                "api": "in process",
                "load": f"{name}, in process",
                "clients": 0,
                "input": o.input_tokens,
                "output": o.output_tokens,
                "documents": o.documents or 0,
                "documents_as": "tokens" if o.documents else "none",
                **summarize(answers),
                "client_cpu_share": 0.0,
            }


async def _discover(url: str, o: HttpOptions) -> tuple[Endpoint, float]:
    """The endpoint, and the words of a token."""
    timeout, form = o.timeout, o.documents_as
    endpoint = Endpoint(url, o.model or "", o.api_key, o.api, "text", o.ignore_eos)
    if not endpoint.model:
        endpoint = replace(endpoint, model=await find_model(endpoint, timeout))
    if form == "auto":
        form = "field" if await has_documents(endpoint, timeout) else "text"
    return replace(endpoint, documents_as=form), await words_per_token(endpoint, timeout)


def _loads(o: HttpOptions, ratio: float) -> Iterator[Load]:
    """Each load."""
    if o.trace:
        with o.trace.open(encoding="utf-8") as file:
            trace = read_trace(file, o.trace.name)
        yield f"trace at speed {o.speed:g}", 0, trace_prompts(trace, o.speed, ratio)
        return
    lengths = Span.parse(o.input_tokens), Span.parse(o.output_tokens)
    size = max(1, round(o.document_tokens * ratio))
    documents = [words(f"document {n}", size) for n in range(o.documents or 0)]
    if o.rates:
        for seed, rate in enumerate(o.rates):
            number = o.requests or 64
            prompts = make_prompts(number, lengths, documents, o.per_request, ratio, seed)
            arrivals = poisson_arrivals(rate, number, seed)
            timed = [replace(p, at=at) for p, at in zip(prompts, arrivals, strict=True)]
            yield f"{rate:g} requests/s", 0, timed
        return
    for seed, streams in enumerate(parse_streams(o.streams)):
        number = o.requests or max(32, 4 * streams)
        prompts = make_prompts(number, lengths, documents, o.per_request, ratio, seed)
        more = make_prompts(o.entering or 0, lengths, documents, o.per_request, ratio, seed + 1000)
        entering = [replace(prompt, at=_ENTER_SECONDS, output=2) for prompt in more]
        name = f"{streams} streams" + (f", {o.entering} enter" if o.entering else "")
        yield name, streams, prompts + entering


def parse_streams(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InvalidOption(f"--streams is a list of positive numbers such as 1,16, not {text!r}")
    return [int(part) for part in parts]
