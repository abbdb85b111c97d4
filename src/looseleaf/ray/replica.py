"""The deployment of engines: each replica is a whole server without a port."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ray import serve

from looseleaf.config import ServerConfig
from looseleaf.ray.asgi import AsgiApp
from looseleaf.router import Affinity
from looseleaf.server.app import make_app
from looseleaf.server.service import make_service

_GRACE_SECONDS = 5.0


class EngineReplica:
    """An engine with the server's whole API. Ray Serve calls its methods by their names."""

    async def __init__(  # type: ignore[misc]
        self, model: str | None, server: Mapping[str, Any], engine: Mapping[str, Any]
    ) -> None:
        """Load ``model`` with the options of `ServerConfig` and of `looseleaf.LLM`."""
        config = ServerConfig(**server)
        self.service = await asyncio.to_thread(make_service, model, config, dict(engine))
        await self.service.start()
        self._app = AsgiApp(make_app(self.service))
        await self._app.start()
        self._name: str = serve.get_replica_context().replica_id.unique_id

    async def call(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        affinity: Affinity,
        target: str,
    ) -> AsyncIterator[Any]:
        """Name, status and headers of a response, then its body piece by piece.

        ``affinity`` and ``target`` are for the request router."""
        async for message in self._app.call(method, path, headers, body):
            if message["type"] == "http.response.start":
                pairs = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in message["headers"]]
                yield self._name, message["status"], pairs
            elif message["type"] == "http.response.body" and message.get("body"):
                yield message["body"]

    def name(self) -> str:
        """The replica's unique id."""
        return self._name

    async def record_routing_stats(self) -> dict[str, Any]:
        """The documents that this replica holds, for the request routers."""
        summary = await self.service.llm.holdings()
        return {"documents": summary.documents, "version": summary.version}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The share of pages in use, without those that can be evicted."""
        summary = await self.service.llm.holdings()
        return {"pages_in_use": 1.0 - summary.available / summary.pages}

    def check_health(self) -> None:
        """Raises RuntimeError after a failure of the engine, so that Ray replaces the replica."""
        if self.service.state not in ("ready", "draining"):
            raise RuntimeError(f"the engine is {self.service.state}")

    async def __del__(self) -> None:
        # Ray calls it after the last request of a replica that ends
        if hasattr(self, "_app"):
            await self._app.stop()
            await asyncio.to_thread(self.service.llm.close, _GRACE_SECONDS)
