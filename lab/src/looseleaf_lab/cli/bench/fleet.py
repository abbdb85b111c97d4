"""``looseleaf bench fleet``: many replicas simulated, or three real ones and their simulation."""

from pathlib import Path
from typing import Any

import click

from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.bench.report import OUTPUT, bench_progress, collect

_COLUMNS = (
    *("replicas", "policy", "tier", "hits", "first_token_p50", "first_token_p99"),
    *("load_over_mean", "gb_moved", "dollars_per_million"),
)


@click.command()
@click.option("--replicas", multiple=True, type=int, help="[default: 8, 64 and 512]")
@click.option("--requests", default=20_000, show_default=True)
@click.option("--documents", default=300, show_default=True, help="documents, per 3 replicas")
@click.option("--room", default=60, show_default=True, help="documents that a replica has room for")
@click.option("--alpha", default=1.0, show_default=True, help="Zipf exponent of their popularity")
@click.option("--per-request", default=1, show_default=True, help="documents of a request")
@click.option("--document-tokens", default=512, show_default=True)
@click.option("--rate", default=6.0, show_default=True, help="requests per second and replica")
@click.option("--output-tokens", default=8, show_default=True)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="requests of a Mooncake trace (JSONL) instead of Zipf's",
)
@click.option("--speed", default=1.0, show_default=True, help="arrivals of the trace, times faster")
@click.option("--step-ms", default=8.0, show_default=True, help="time of a step without new tokens")
@click.option("--prefill-us", default=50.0, show_default=True, help="time of a new token")
@click.option("--gbps", default=2.5, show_default=True, help="GB/s from the shared tier")
@click.option("--hourly", default=2.0, show_default=True, help="price of a replica-hour in dollars")
@click.option(
    "--clients",
    type=int,
    help="clients, per 3 replicas, that send one request after another, instead of --rate",
)
@click.option("--real", is_flag=True, help="three servers of the reference model on this machine")
@click.option("--shape", help="shape of a random checkpoint instead of that model, such as tiny")
@click.option(
    "--arm",
    "arms",
    multiple=True,
    type=click.Choice(["documents", "round robin", "one engine", "ray serve", "kills"]),
    help="of the real runs; may be given several times [default: the first three]",
)
@click.option("--seed", default=0, show_default=True)
@OUTPUT
def fleet(
    replicas: tuple[int, ...], real: bool, arms: tuple[str, ...], output: Path | None, **sizes: Any
) -> None:
    """Hits, first token, bytes moved and cost of a fleet, by router and tier.

    With --real, the same requests go through looseleaf route to three servers, in turn to three
    servers, and to one with the room of all, each beside its simulation with costs measured there.
    The arm "ray serve" has Ray's replicas instead. The arm "kills" ends each server and twice the
    proxy by SIGKILL, and counts wrong answers and lost attempts, which are sent again.
    """
    if min(sizes["requests"], sizes["documents"], sizes["room"], sizes["per_request"]) < 1:
        raise InvalidOption("--requests, --documents, --room and --per-request must be positive")
    if min(sizes["rate"], sizes["speed"], sizes["step_ms"], sizes["gbps"]) <= 0:
        raise InvalidOption("--rate, --speed, --step-ms and --gbps must be positive")
    if sizes["clients"] is not None and sizes["clients"] < 1:
        raise InvalidOption("--clients must be positive")
    if real and sizes["output_tokens"] < 2:
        raise InvalidOption("--output-tokens must be at least 2 with --real")

    def summarize(row: Any) -> str:
        return f"{row['replicas']} replicas, {row['policy']}, tier {row['tier']}: {row['hits']:.3f}"

    with bench_progress({"replicas": replicas or (8, 64, 512)} | sizes, "cpu"):
        source = _real(sizes, arms) if real else _simulated(replicas or (8, 64, 512), sizes)
        rows = collect(({**row, **_sizes(sizes)} for row in source), summarize, output, "fleet")
    from looseleaf_lab.bench.results import show_table

    show_table(rows, "fleet", _COLUMNS)


def _traffic(sizes: dict[str, Any], replicas: int) -> Any:
    from looseleaf_lab.bench.fleet.requests import ZipfConfig

    return ZipfConfig(
        requests=sizes["requests"],
        documents=max(1, sizes["documents"] * replicas // 3),
        alpha=sizes["alpha"],
        per_request=sizes["per_request"],
        document_tokens=sizes["document_tokens"],
        output_tokens=sizes["output_tokens"],
        rate=sizes["rate"] * replicas,
        seed=sizes["seed"],
    )


def _sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row that tell its traffic."""
    names = ("documents", "room", "document_tokens", "output_tokens", "alpha", "per_request")
    clients = sizes["clients"]
    load = f"{sizes['rate']:g} per second and replica" if clients is None else f"{clients} clients"
    return {name: sizes[name] for name in names} | {
        "load": load if sizes["trace"] is None else sizes["trace"].name,
        "shape": sizes["shape"] or "reference",
    }


def _real(sizes: dict[str, Any], arms: tuple[str, ...]) -> Any:
    from looseleaf_lab.bench.fleet.compare import ARMS, RealConfig, compare

    config = RealConfig(
        sizes["room"], arms=arms or ARMS[:3], shape=sizes["shape"], clients=sizes["clients"]
    )
    return compare(_traffic(sizes, 3), config)


def _simulated(replicas: tuple[int, ...], sizes: dict[str, Any]) -> Any:
    from looseleaf_lab.bench.endpoint.trace import read_trace
    from looseleaf_lab.bench.fleet.costs import Costs
    from looseleaf_lab.bench.fleet.replica import PAGE
    from looseleaf_lab.bench.fleet.requests import trace_requests, zipf_requests
    from looseleaf_lab.bench.fleet.simulate import POLICIES, FleetConfig, simulate

    costs = Costs(
        step=sizes["step_ms"] / 1e3,
        prefill=sizes["prefill_us"] / 1e6,
        load_bandwidth=sizes["gbps"] * 1e9,
        hourly=sizes["hourly"],
    )
    for number in replicas:
        if sizes["trace"] is not None:
            lines = sizes["trace"].read_text(encoding="utf-8").splitlines()
            requests = trace_requests(read_trace(lines, sizes["trace"].name), sizes["speed"])
        else:
            requests = zipf_requests(_traffic(sizes, number))
        room = sizes["room"] * -(-sizes["document_tokens"] // PAGE) * PAGE
        clients = sizes["clients"] and max(1, sizes["clients"] * number // 3)
        for policy in POLICIES:
            for shared in (False, True) if policy == "documents" else (False,):
                config = FleetConfig(number, room, shared, policy, clients=clients)
                yield simulate(requests, config, costs)
