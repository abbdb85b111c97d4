"""The fleet of Ray Serve's replicas, as the proxy's `Fleet`.

Ray chooses the replica by `DocumentRouter`. A call to a named replica passes the name along."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from looseleaf.proxy.fleet import Call, Headers, ReplicaLost
from looseleaf.router import Affinity

ATTEMPTS = 3
"""Calls of one request, of which each may meet a replica that ends."""

_REFRESH_SECONDS = 2.0
_ROUND_SECONDS = 5.0
_LOST = (RayActorError, BackPressureError, DeploymentUnavailableError)


@dataclass(eq=False)
class RayReply:
    """A response whose head has arrived."""

    replica: str
    status: int
    headers: Headers
    stream: Any

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, piece by piece. Raises ReplicaLost."""
        try:
            async for chunk in self.stream:
                yield chunk
        except _LOST as error:
            raise ReplicaLost(str(error)) from error

    async def close(self) -> None:
        """End the call."""
        self.stream.cancel()


@dataclass(eq=False)
class RayFleet:
    """The replicas behind a handle. `open` begins to follow their names."""

    handle: DeploymentHandle
    log: Any
    _names: list[str] = field(default_factory=list)
    _task: "asyncio.Task[None] | None" = None

    async def open(self) -> None:
        """Learn the names of the replicas, and follow them from now on."""
        await self._learn()
        self._task = asyncio.create_task(self._follow())

    def order(self, affinity: Affinity) -> list[str]:
        """Attempts, each at the replica that Ray's router chooses."""
        return [""] * ATTEMPTS

    def everyone(self) -> list[str]:
        """The names of the replicas, as of a moment ago."""
        return list(self._names)

    async def send(self, replica: str, call: Call, affinity: Affinity) -> RayReply:
        """The head of a response. Raises ReplicaLost."""
        method = self.handle.options(method_name="call", stream=True)
        stream = method.remote(
            call.method,
            call.path,
            [*call.headers],
            call.body,
            affinity=affinity,
            target=replica,
        )
        try:
            name, status, headers = await anext(stream)
        except _LOST as error:
            raise ReplicaLost(str(error)) from error
        except StopAsyncIteration as error:
            raise ReplicaLost("the replica gave no answer") from error
        except BaseException:
            stream.cancel()
            raise
        return RayReply(name, status, headers, stream)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            await self._learn()

    async def _learn(self) -> None:
        # a failed round leaves the last names, and a call to a lost one fails by itself
        try:
            async with asyncio.timeout(_ROUND_SECONDS):
                response = self.handle.broadcast("name")
                self._names = sorted(await response.results_async())
        except Exception as error:
            self.log.info("names_unknown", reason=f"{type(error).__name__}: {error}"[:300])
