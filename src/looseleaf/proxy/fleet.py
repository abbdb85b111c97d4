"""The protocol of a fleet of replicas: calls to one replica, and the order in which to try them."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from looseleaf.router import Affinity

Headers = Sequence[tuple[str, str]]

_KEPT = ("authorization", "x-api-key", "host")


class ReplicaLost(Exception):
    """The replica ended or can't be reached. Its answer is incomplete or absent."""


class ReplicaSilent(ReplicaLost):
    """The replica has the request, but has sent nothing for too long. It may still compute."""


@dataclass(frozen=True)
class Call:
    """An HTTP request to a replica; ``path`` includes the query, ``key`` is its credential."""

    method: str
    path: str
    headers: Headers = ()
    body: bytes = b""
    key: str = field(default="", repr=False)

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]

    def to(self, method: str, path: str, body: bytes = b"") -> "Call":
        """Another call with the same credential."""
        kept = [(n, v) for n, v in self.headers if n.lower() in _KEPT]
        if body:
            kept.append(("content-type", "application/json"))
        return replace(self, method=method, path=path, headers=kept, body=body)


@runtime_checkable
class Reply(Protocol):
    """A response whose head has arrived. `close` ends the call, also before the body's end."""

    @property
    def replica(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Headers: ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body, piece by piece. Raises ReplicaLost."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Fleet(Protocol):
    """Replicas by name."""

    def order(self, affinity: Affinity) -> list[str]:
        """The usable replicas in the order in which to try them."""
        ...

    def everyone(self) -> list[str]:
        """All usable replicas."""
        ...

    async def send(self, replica: str, call: Call, affinity: Affinity) -> Reply:
        """The head of a replica's response. Raises ReplicaLost, after a silence ReplicaSilent."""
        ...


async def read_all(reply: Reply) -> bytes:
    """The whole body of a response, which is closed. Raises ReplicaLost."""
    try:
        return b"".join([chunk async for chunk in reply.chunks()])
    finally:
        await reply.close()
