"""``looseleaf bench``: speed against baselines of the same run, appended to ``results/``."""

import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from looseleaf.cli.lazy import SuggestingGroup
from looseleaf.errors import InvalidOption, install
from looseleaf_lab.cli.bench.agents import agents
from looseleaf_lab.cli.bench.claims import hits, lazy, rate, relay
from looseleaf_lab.cli.bench.fleet import fleet
from looseleaf_lab.cli.bench.fuse import fuse
from looseleaf_lab.cli.bench.hosted import hosted
from looseleaf_lab.cli.bench.http import http
from looseleaf_lab.cli.bench.hybrids import hybrids
from looseleaf_lab.cli.bench.index import index
from looseleaf_lab.cli.bench.llamacpp import llamacpp
from looseleaf_lab.cli.bench.report import DEVICE, OUTPUT, bench_progress, collect, report
from looseleaf_lab.cli.bench.select import select
from looseleaf_lab.cli.bench.tensor_parallel import tensor_parallel
from looseleaf_lab.cli.bench.tiers import tiers
from looseleaf_lab.errors import INSTALL

# a seed of 0 is valid, 0 batches skip the sustained load, and 0 skipped requests count all
_ZERO_ALLOWED = ("--seed", "--batches", "--skipped")


@click.group(cls=SuggestingGroup)
def bench() -> None:
    """Measure speed against a baseline of the same run."""


@bench.command()
@click.option("--model", help="checkpoint folder or hub id [default: the reference model]")
@click.option("--shape", help="a random checkpoint of this shape instead, e.g. qwen2.5-0.5b")
@click.option(
    "--prompt-tokens", default=1000, show_default=True, help="longest prompt to decode from"
)
@click.option(
    "--document-tokens",
    default=512,
    show_default=True,
    help="length of each of the 5 documents before a first token",
)
@click.option("--batch", "batches", multiple=True, type=int, help="batch sizes [default: 1 and 16]")
@click.option("--new-tokens", default=32, show_default=True, help="tokens of each answer")
@click.option("--repetitions", default=5, show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@OUTPUT
def generate(
    model: str | None,
    shape: str | None,
    prompt_tokens: int,
    document_tokens: int,
    batches: tuple[int, ...],
    output: Path | None,
    **sizes: Any,
) -> None:
    """Tokens per second and time to first token, against Transformers' generate."""
    if find_spec("transformers") is None:
        raise InvalidOption(f"the baseline needs transformers: {INSTALL}")
    from looseleaf.llm.load import find_model, pick_device, reference_model
    from looseleaf_lab.bench.checkpoints import write_random_checkpoint
    from looseleaf_lab.bench.generate import GenerateConfig, Material, measure
    from looseleaf_lab.bench.results import show_table
    from looseleaf_lab.evals.world import make_example

    if model and shape:
        raise InvalidOption("give --model or --shape, not both")
    with tempfile.TemporaryDirectory() as scratch:
        if shape:
            folder, name = write_random_checkpoint(shape, Path(scratch) / shape), f"{shape}, random"
        elif model:
            folder, name = find_model(model), Path(model).name
        else:
            folder, name = reference_model(), "reference"
        lengths = prompt_tokens, document_tokens
        config = GenerateConfig(folder, name, *lengths, batches or (1, 16), **sizes)
        examples = [make_example("lookup", seed) for seed in range(128)]
        text = "\n".join(document for e in examples for document in e.documents)
        material = Material(text, tuple(e.question for e in examples))

        def summarize(row: Any) -> str:
            return f"{row['measurement']}: {row['times_faster']:.2f} times faster"

        with bench_progress(config, pick_device("auto")) as progress:
            rows = collect(measure(config, material, progress), summarize, output, "generate")
    columns = ("measurement", "looseleaf", "transformers", "unit", "times_faster")
    show_table(rows, f"generate: {name}", columns)


@bench.command()
@click.option("--documents", default=100, show_default=True, help="documents in the world")
@click.option("--per-request", default=5, show_default=True, help="documents per request")
@click.option("--capacity", default=20, show_default=True, help="documents that fit in the pool")
@click.option("--alpha", default=1.1, show_default=True, help="Zipf exponent of their popularity")
@click.option("--requests", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True)
@OUTPUT
def reuse(output: Path | None, documents: int, requests: int, **sizes: Any) -> None:
    """Hit ratio, cached bytes and time to first token for popular documents in random order."""
    from looseleaf.llm.load import pick_device, reference_model
    from looseleaf_lab.bench.reuse import ReuseConfig, measure
    from looseleaf_lab.evals.world import make_example

    if requests < 10:
        raise InvalidOption("--requests must be at least 10: the first fifth only fills the cache")
    if sizes["per_request"] > documents:
        raise InvalidOption("--per-request must be at most --documents")
    config = ReuseConfig(
        reference_model(),
        "reference",
        documents,
        requests=requests,
        skipped=requests // 5,
        **sizes,
    )
    examples = [make_example("lookup", seed) for seed in range(documents)]
    # three documents of a world: a page or two of text
    texts = ["\n".join(e.documents[:3]) for e in examples]
    with bench_progress(config, pick_device("auto")) as progress:
        rows = measure(config, texts, [e.question for e in examples], progress)
    columns = (
        "cache",
        "hit_ratio",
        "closed_form",
        "kib_per_document",
        "kib_held",
        "first_token_ms",
    )
    report(rows, "reuse: reference", columns, output, "reuse")


@bench.command("serve")
@click.option("--streams", default=200, show_default=True, help="concurrent clients")
@click.option("--seconds", default=300.0, show_default=True, help="duration of the load")
@click.option("--documents", default=20, show_default=True, help="texts of the questions")
@click.option("--tenants", default=3, show_default=True)
@click.option("--leaving", default=0.1, show_default=True, help="share of mid-answer disconnects")
@click.option("--seed", default=0, show_default=True)
@OUTPUT
def serve_load(output: Path | None, **sizes: Any) -> None:
    """Streams of the reference model under load; every answer is compared with a lone one."""
    for package in ("fastapi", "httpx"):
        if find_spec(package) is None:
            raise InvalidOption(f"bench serve needs {package}: {install('serve')}")
    from looseleaf.llm.load import pick_device
    from looseleaf_lab.bench.serve import Load, measure
    from looseleaf_lab.evals.world import make_example

    load = Load(**sizes)
    if load.streams < 1 or load.documents < 1 or load.tenants < 1 or load.seconds <= 0:
        raise InvalidOption("--streams, --documents, --tenants and --seconds must be positive")
    examples = [make_example("lookup", seed) for seed in range(load.documents)]
    texts = ["\n".join(e.documents[:2]) for e in examples]
    with bench_progress(load, pick_device("auto")) as progress:
        row = measure(load, texts, [e.question for e in examples], progress)
    columns = ("streams", "finished", "left_midway", "first_token_p50_ms", "first_token_p99_ms")
    report([row], "serve: reference", (*columns, "tokens_per_s"), output, "serve")


@bench.command()
@click.option(
    "--shape",
    default="llama-3.1-8b",
    show_default=True,
    help="shape of the random model; tiny runs at toy sizes anywhere",
)
@DEVICE
@click.option("--repetitions", type=int, help="of every line [default: 5]")
@click.option("--attention-costs", default="built-in", type=click.Choice(["built-in", "measured"]))
@click.option("--kv-dtype", default="auto", type=click.Choice(["auto", "fp8"]))
@click.option("--batch-invariant/--no-batch-invariant", default=False)
@click.option(
    "--quantize",
    type=click.Choice(["fp8", "int8", "int4"]),
    help="codes of the layers' matrices, on a GPU [default: 16 bits]",
)
@click.option(
    "--blocks",
    type=click.Choice(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]),
    help="GGUF format of all matrices [default: none]",
)
@click.option(
    "--line",
    "lines",
    multiple=True,
    type=click.Choice(
        ["cached", "cold", "shared", "private", "decode", "short", "prefill", "rates"]
    ),
    help="of the table; may be given several times [default: all]",
)
@OUTPUT
def serving(
    shape: str,
    device: str,
    repetitions: int | None,
    lines: tuple[str, ...],
    output: Path | None,
    **variant: Any,
) -> None:
    """First tokens, time per token and throughput of a server's workloads, with their floors."""
    import dataclasses

    from looseleaf.llm.load import pick_device
    from looseleaf_lab.bench.results import show_table
    from looseleaf_lab.bench.serving import ServingSizes, ServingVariant, measure

    sizes = ServingSizes.of_shape(shape)
    if repetitions is not None:
        sizes = dataclasses.replace(sizes, repetitions=repetitions)
    columns = (
        "measurement", "unit", "looseleaf", "looseleaf_low", "looseleaf_high", "floor",
        "roofline_share",
    )  # fmt: skip

    def summarize(row: Any) -> str:
        return f"{row['measurement']}: {row['looseleaf']:.4g} {row['unit']}"

    selected_device = pick_device(device)
    sizes_and_options = {"shape": shape, "lines": lines} | dataclasses.asdict(sizes) | variant
    with bench_progress(sizes_and_options, selected_device) as progress:
        rows_measured = measure(
            shape, sizes, selected_device, ServingVariant(**variant), lines, progress
        )
        rows = collect(rows_measured, summarize, output, "serving")
    show_table(rows, f"serving: {shape}", columns)


@bench.command()
@click.option("--longest", default=16384, show_default=True, help="keys of the longest case")
@click.option("--rows", default=64, show_default=True, help="rows of a usual decode batch")
@click.option("--head-dim", default=128, show_default=True)
@click.option("--shape", "model", help="the heads of this model's shape, e.g. deepseek-v2-lite")
@click.option("--repetitions", default=9, show_default=True)
@DEVICE
@click.option("--peers/--no-peers", default=True, show_default=True, help="PyTorch, FlashInfer")
@click.option("--case", "only", multiple=True, help="part of a case's name [default: all cases]")
@OUTPUT
def attention(
    head_dim: int, model: str | None, device: str, output: Path | None, **sizes: Any
) -> None:
    """Attention of a layer and its roofline: decode, shared or not, and prefill."""
    import dataclasses

    from looseleaf.llm.load import pick_device
    from looseleaf_lab.bench.attention import AttentionConfig, measure, ratios
    from looseleaf_lab.bench.attention_cases import AttentionShape
    from looseleaf_lab.bench.model_shapes import model_shape
    from looseleaf_lab.bench.results import show_table

    shape = AttentionShape(head_dim=head_dim)
    if model is not None:
        shape = AttentionShape.of(model_shape(model))
    config = AttentionConfig(shape, device=str(pick_device(device)), **sizes)
    columns = ("measurement", "arm", "median", "low", "high", "floor", "share_of_roofline")

    def summarize(row: Any) -> str:
        return f"{row['measurement']}, {row['arm']}: {row['median']:.1f} us"

    on_missing = partial(click.echo, err=True)
    with bench_progress(dataclasses.asdict(shape) | vars(config), config.device) as progress:
        rows = collect(measure(config, on_missing, progress), summarize, output, "attention")
    for sentence in ratios(rows):
        click.echo(sentence, err=True)
    show_table(rows, f"attention: {model or f'heads of {head_dim}'}", columns)


for _command in (
    agents, fleet, fuse, hits, hosted, http, hybrids, index, lazy, llamacpp, rate, relay, select,
    tensor_parallel, tiers,
):  # fmt: skip
    bench.add_command(_command)

for _command in bench.commands.values():
    for _option in _command.params:
        if _option.type is click.INT and _option.opts[0] not in _ZERO_ALLOWED:
            # a size of 0 measures nothing
            _option.type = click.IntRange(min=1)
