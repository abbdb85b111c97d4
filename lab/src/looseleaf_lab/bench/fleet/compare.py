"""Real servers beside the simulation: the same requests, with costs measured in the same run."""

import asyncio
import re
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace

import httpx

from looseleaf_lab.bench.endpoint.workload import words
from looseleaf_lab.bench.fleet.real import MODEL, Texts, behind, calibrate, figures, replay
from looseleaf_lab.bench.fleet.requests import ZipfConfig, zipf_requests
from looseleaf_lab.bench.fleet.servers import direct, fleet_of
from looseleaf_lab.bench.fleet.simulate import FleetConfig, simulate
from looseleaf_lab.bench.results import Row

PAGE = 16
_SPARE_PAGES = 64
"""Pages for running requests beside the documents."""


ARMS = ("documents", "round robin", "one engine")
"""By documents, in turn, and at one engine with the room of all."""


def compare(
    traffic: ZipfConfig, room: int, replicas: int = 3, arms: Sequence[str] = ARMS
) -> Iterator[Row]:
    """Rows of real runs and of simulations for each of ``arms``.

    ``room`` is in documents per replica. Each arm has fresh servers."""
    requests = zipf_requests(traffic)
    pages = -(-traffic.document_tokens // PAGE) + 1
    for policy in arms:
        number, share = (1, replicas) if policy == "one engine" else (replicas, 1)
        with fleet_of(number, room * share * pages + _SPARE_PAGES) as (proxy, servers):
            texts = Texts(_words_per_token(servers[0]))
            costs = asyncio.run(calibrate(proxy, servers[0], texts, requests[0]))
            before = _sent(proxy)
            urls = direct(servers) if policy == "round robin" else behind(proxy)
            times = asyncio.run(replay(requests, urls, texts))
            loads = [n - before.get(url, 0) for url, n in _sent(proxy).items()]
            if policy == "round robin":
                loads = [1] * number
            yield figures(policy, replicas, times, loads)
            tokens = round(sum(t.tokens for t in times) / max(1, len(times)))
        measured = replace(traffic, document_tokens=max(1, tokens // traffic.per_request))
        config = FleetConfig(replicas=number, room=room * share * measured.document_tokens)
        simulated = "documents" if policy == "one engine" else policy
        row = simulate(zipf_requests(measured), config, costs, policy=simulated)
        yield {**row, "policy": f"{policy}, simulated", "replicas": replicas}


def _words_per_token(url: str) -> float:
    text = words("length", 400)
    answer = httpx.post(f"{url}/tokenize", json={"model": MODEL, "prompt": text}, timeout=30)
    return 400 / float(answer.json()["count"])


def _sent(proxy: str) -> dict[str, int]:
    """Requests that the proxy has sent, by replica."""
    with urllib.request.urlopen(f"{proxy}/metrics") as response:
        content = response.read().decode()
    pattern = r'looseleaf_route_requests_total\{replica="([^"]+)"\} (\S+)'
    return {url: int(float(number)) for url, number in re.findall(pattern, content)}
