"""A fleet in memory: each replica is a function from a call to a status, headers and chunks."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from looseleaf.proxy.app import ProxyApp
from looseleaf.proxy.fleet import Call, Fleet, ReplicaLost, ReplicaSilent
from looseleaf.proxy.forwarder import Forwarder
from looseleaf.proxy.metrics import ProxyMetrics
from looseleaf.proxy.registered import RegisteredBodies
from looseleaf.server.limits import KeyLimits

LOST = object()
"""A chunk in whose place the replica ends."""

SILENT = object()
"""A chunk in whose place the replica sends nothing for too long."""

Script = tuple[int, str, Sequence[object]]
Replica = Callable[[Call], Script | None]


def answers(status: int, body: object) -> Script:
    return status, "application/json", [json.dumps(body).encode()]


def refuses(status: int, code: str) -> Script:
    return answers(status, {"error": {"message": "no", "code": code}})


def streams(*chunks: object) -> Script:
    return 200, "text/event-stream; charset=utf-8", chunks


@dataclass
class FakeReply:
    replica: str
    script: Script
    closed: list[str]

    @property
    def status(self) -> int:
        return self.script[0]

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [("content-type", self.script[1])]

    async def chunks(self) -> AsyncIterator[bytes]:
        for chunk in self.script[2]:
            if chunk is LOST:
                raise ReplicaLost("it ended")
            if chunk is SILENT:
                raise ReplicaSilent("the replica sent nothing for 1 s")
            assert isinstance(chunk, bytes)
            yield chunk

    async def close(self) -> None:
        self.closed.append(self.replica)


@dataclass
class FakeFleet:
    """Replicas in a fixed order; a replica that returns None can't be reached."""

    replicas: dict[str, Replica]
    calls: list[tuple[str, Call]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def order(self, affinity) -> list[str]:
        return list(self.replicas)

    def everyone(self) -> list[str]:
        return list(self.replicas)

    async def send(self, replica: str, call: Call, affinity) -> FakeReply:
        self.calls.append((replica, call))
        script = self.replicas[replica](call)
        if script is None:
            raise ReplicaLost("nothing listens")
        return FakeReply(replica, script, self.closed)

    def paths(self) -> list[tuple[str, str, str]]:
        return [(replica, call.method, call.path) for replica, call in self.calls]


class Silent:
    """A log without output."""

    def info(self, *_: object, **__: object) -> None: ...
    def warning(self, *_: object, **__: object) -> None: ...


def proxy(
    fleet: Fleet,
    per_minute: int | None = None,
    max_body: int = 1 << 20,
    concurrent: int | None = None,
) -> ProxyApp:
    forwarder = Forwarder(fleet, RegisteredBodies(1 << 16), ProxyMetrics())
    return ProxyApp(forwarder, KeyLimits(per_minute, concurrent), max_body, Silent())


def client(app: ProxyApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
