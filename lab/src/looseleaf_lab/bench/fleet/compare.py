"""Real servers beside the simulation: the same requests, with costs measured in the same run."""

import asyncio
import math
import re
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from looseleaf.router import LoadLimits
from looseleaf_lab.bench.checkpoints import write_random_checkpoint
from looseleaf_lab.bench.endpoint.workload import words
from looseleaf_lab.bench.fleet.calibrate import Totals, idle_costs, loaded_costs, read_totals
from looseleaf_lab.bench.fleet.costs import Costs
from looseleaf_lab.bench.fleet.kills import QUESTIONS, with_kills
from looseleaf_lab.bench.fleet.real import Texts, Timed, behind, figures, in_turn, replay
from looseleaf_lab.bench.fleet.replica import PAGE
from looseleaf_lab.bench.fleet.requests import FleetRequest, ZipfConfig, zipf_requests
from looseleaf_lab.bench.fleet.servers import RealFleet, fleet_of, ray_fleet
from looseleaf_lab.bench.fleet.simulate import FleetConfig, simulate
from looseleaf_lab.bench.results import Row

_PAGES_PER_CLIENT = 3
"""Pages of a running request beside its documents."""

CLIENTS = 16
"""Clients of a run with kills, and expected requests in flight, unless their number is given."""

_SAMPLES = 12
_UNUSED = 10**6
"""Numbers of documents and questions that no traffic has."""

ARMS = ("documents", "round robin", "one engine", "ray serve", "kills")
"""By documents, in turn, at one engine with the room of all, by documents under Ray Serve, and by
documents while replicas and the proxy are killed."""


@dataclass(frozen=True)
class RealConfig:
    """``room`` is in documents per replica, ``shape`` that of a random checkpoint; None is the
    reference model. ``clients`` send one request after another; None keeps the arrivals."""

    room: int
    replicas: int = 3
    arms: Sequence[str] = ARMS[:3]
    shape: str | None = None
    clients: int | None = None


def compare(traffic: ZipfConfig, config: RealConfig) -> Iterator[Row]:
    """Rows of real runs and of simulations for each arm, which has fresh servers."""
    requests = zipf_requests(traffic)
    with tempfile.TemporaryDirectory() as folder:
        model = None if config.shape is None else Path(folder)
        if config.shape is not None:
            write_random_checkpoint(config.shape, Path(folder))
        for arm in config.arms:
            yield from _arm(arm, requests, traffic, config, model)


def _arm(
    arm: str,
    requests: Sequence[FleetRequest],
    traffic: ZipfConfig,
    config: RealConfig,
    model: Path | None,
) -> Iterator[Row]:
    number, share = (1, config.replicas) if arm == "one engine" else (config.replicas, 1)
    pages = -(-traffic.document_tokens // PAGE) + 1
    running = math.ceil(LoadLimits().factor * (config.clients or CLIENTS) / number)
    room = config.room * share * pages + _PAGES_PER_CLIENT * running
    start = ray_fleet if arm == "ray serve" else fleet_of
    with start(number, room, model) as fleet:
        texts = _texts(fleet.url, QUESTIONS if arm == "kills" else None)
        if arm == "kills":
            times, wrong = with_kills(requests, fleet, texts, config.clients or CLIENTS)
            # restarts reset the counts of requests by replica
            yield figures(arm, number, times, [0], wrong)
            return
        urls = behind(fleet.url)
        if arm == "round robin":
            urls = in_turn([server.url for server in fleet.servers])
        run = _measured(requests, fleet, urls, texts, config.clients)
        yield figures(arm, number, run.times, [1] if arm == "round robin" else run.loads)
    if run.costs is not None:
        fleet_config = FleetConfig(
            replicas=number,
            room=config.room * share * pages * PAGE,
            policy="round robin" if arm == "round robin" else "documents",
            clients=config.clients,
        )
        measured = replace(
            traffic,
            document_tokens=run.document_tokens(traffic.per_request),
            text_tokens=run.text_tokens(),
        )
        row = simulate(zipf_requests(measured), fleet_config, run.costs)
        yield {**row, "policy": f"{arm}, simulated", "replicas": number}


@dataclass(frozen=True)
class _Run:
    """Times of a real run, requests by replica, and the costs after its first fifth."""

    times: Sequence[Timed]
    loads: Sequence[int]
    costs: Costs | None

    def document_tokens(self, per_request: int) -> int:
        """The mean tokens of a document."""
        return max(1, round(sum(t.tokens for t in self.times) / len(self.times) / per_request))

    def text_tokens(self) -> int:
        """The mean computed tokens of a request's text."""
        return max(1, round(sum(t.text_tokens for t in self.times) / len(self.times)))


def _measured(
    requests: Sequence[FleetRequest],
    fleet: RealFleet,
    urls: Iterator[str],
    texts: Texts,
    clients: int | None,
) -> _Run:
    """Replay ``requests``. The servers' counters are those of looseleaf's own processes only."""
    servers, numbered = [server.url for server in fleet.servers], dict(enumerate(requests))
    if not servers:
        before = _sent(fleet.url)
        times = asyncio.run(replay(numbered.items(), urls, texts, clients))
        return _Run(times, _difference(before, _sent(fleet.url)), None)
    idle = _idle_costs(servers[0], texts, requests[0])
    fifth, begins = max(1, len(requests) // 5), list[Totals]()
    before = _sent(fleet.url)
    interrupts = {fifth: lambda: begins.append(read_totals(servers))}
    times = asyncio.run(replay(numbered.items(), urls, texts, clients, interrupts))
    end, steady = read_totals(servers), times[fifth:]
    # other processes of the machine may change in the run, so the sample is from all of it
    costs = loaded_costs(idle, steady[::5], len(steady), begins[0], end)
    return _Run(times, _difference(before, _sent(fleet.url)), costs)


def _idle_costs(server: str, texts: Texts, request: FleetRequest) -> Costs:
    """The costs of requests one at a time: the first ones load code, the last ones are cached."""
    tokens = request.documents[0][1]
    numbers = [*range(2 * _SAMPLES), *range(_SAMPLES, 2 * _SAMPLES)]
    numbered = {
        _UNUSED + place: replace(request, documents=((_UNUSED + number, tokens),))
        for place, number in enumerate(numbers)
    }
    times = asyncio.run(replay(numbered.items(), in_turn([server]), texts, 1))
    return idle_costs(times[_SAMPLES:], request.output_tokens)


def _difference(before: Mapping[str, int], after: Mapping[str, int]) -> list[int]:
    return [number - before.get(name, 0) for name, number in after.items()]


def _texts(url: str, questions: int | None) -> Texts:
    model = str(httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"])
    text = words("length", 400)
    answer = httpx.post(f"{url}/tokenize", json={"model": model, "prompt": text}, timeout=30)
    return Texts(model, 400 / float(answer.json()["count"]), questions)


def _sent(proxy: str) -> dict[str, int]:
    """Requests that the proxy has sent, by replica."""
    with urllib.request.urlopen(f"{proxy}/metrics") as response:
        content = response.read().decode()
    pattern = r'looseleaf_route_requests_total\{replica="([^"]+)"\} (\S+)'
    return {url: int(float(number)) for url, number in re.findall(pattern, content)}
