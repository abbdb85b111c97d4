"""A fleet of servers over HTTP.

One task per replica keeps a call of ``GET /v1/holdings`` open. The replica answers it when its
documents change, and its failure is the first sign of a lost replica. A long step of the engine
delays it, so a replica that is late is probed by ``GET /ready``. A replica without holdings, or
whose operator's key is unknown, has only this probe and is routed by hash."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from looseleaf.config.route import RouteConfig
from looseleaf.proxy.fleet import Call, Headers, ReplicaLost, ReplicaSilent
from looseleaf.proxy.metrics import ProxyMetrics
from looseleaf.router import Affinity, LoadLimits, Router

POLL_SECONDS = 10.0
"""Longest wait of a replica before it answers that its documents are unchanged."""

_PAUSE_SECONDS = 0.5
_LATE_SECONDS = 5.0
_MAX_BACKOFF = 5.0
_CHUNK_BYTES = 1 << 16
_OWN_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_HOP_HEADERS = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "content-length", "expect"),
}
_LOST = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(eq=False)
class HttpReply:
    """A response of a replica."""

    replica: str
    response: aiohttp.ClientResponse
    on_close: Callable[[], None]
    as_lost: Callable[[Exception], ReplicaLost]
    _closed: bool = False

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def headers(self) -> Headers:
        return [(n, v) for n, v in self.response.headers.items() if n.lower() not in _HOP_HEADERS]

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, piece by piece. Raises ReplicaLost."""
        try:
            while chunk := await self.response.content.readany():
                yield chunk
        except _LOST as error:
            raise self.as_lost(error) from error

    async def close(self) -> None:
        """End the call; a connection with an unread body is closed."""
        if not self._closed:
            self._closed = True
            self.on_close()
            self.response.release() if self.response.content.is_eof() else self.response.close()


@dataclass(eq=False)
class HttpFleet:
    """The servers at ``urls``; ``operator_key`` reads their holdings. `open` starts the probes."""

    urls: Sequence[str]
    config: RouteConfig
    metrics: ProxyMetrics
    log: Any
    operator_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        limits = LoadLimits(
            self.config.load_factor, self.config.load_slack, self.config.load_half_life
        )
        self.router = Router(time.monotonic, limits)
        self._up: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Begin to probe the replicas."""
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self.config.connect_seconds,
            sock_read=self.config.silence_seconds,
        )
        self._session = aiohttp.ClientSession(
            timeout=timeout,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=20),
            auto_decompress=False,
            read_bufsize=_CHUNK_BYTES,
            skip_auto_headers=_OWN_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._tasks = [asyncio.create_task(self._watch(url)) for url in self.urls]

    async def close(self) -> None:
        """End the probes and all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def order(self, affinity: Affinity) -> list[str]:
        """The replicas that answer, in the order in which to try them."""
        return self.router.order(affinity, self.everyone())

    def everyone(self) -> list[str]:
        """All replicas that answer."""
        return [url for url in self.urls if url in self._up]

    async def send(self, replica: str, call: Call, affinity: Affinity) -> HttpReply:
        """The head of a replica's response. Raises ReplicaLost, after a silence ReplicaSilent."""
        self.metrics.tokens.inc(sum(weight for _, weight in affinity.documents))
        self.metrics.held_tokens.inc(self.router.held_tokens(replica, affinity))
        self.router.begin(replica, affinity)
        try:
            response = await self._request(replica, call)
        except BaseException:
            self.router.end(replica)
            raise
        return HttpReply(replica, response, lambda: self.router.end(replica), self._as_lost)

    async def _request(self, replica: str, call: Call) -> aiohttp.ClientResponse:
        assert self._session is not None, "the fleet is open"
        headers = [(n, v) for n, v in call.headers if n.lower() not in _HOP_HEADERS]
        try:
            return await self._session.request(
                call.method,
                # the client has encoded its path already
                URL(replica + call.path, encoded=True),
                headers=headers,
                data=call.body or None,
                allow_redirects=False,
            )
        except aiohttp.ClientConnectorError as error:
            self._lose(replica, str(error))
            raise ReplicaLost(str(error)) from error
        except _LOST as error:
            raise self._as_lost(error) from error

    def _as_lost(self, error: Exception) -> ReplicaLost:
        # aiohttp's timer of reads begins when the request is sent
        if isinstance(error, aiohttp.SocketTimeoutError):
            seconds = self.config.silence_seconds
            return ReplicaSilent(f"the replica sent nothing for {seconds:g} s")
        return ReplicaLost(str(error))

    async def _watch(self, url: str) -> None:
        version: str | None = None
        failures = 0
        while True:
            try:
                version = await self._poll_or_probe(url, version)
                failures = 0
                await asyncio.sleep(_PAUSE_SECONDS)
            except (*_LOST, ValueError, KeyError) as error:
                version = None
                self._lose(url, str(error) or type(error).__name__)
                await asyncio.sleep(min(_MAX_BACKOFF, _PAUSE_SECONDS * 2**failures))
                failures = min(failures + 1, 8)

    async def _poll_or_probe(self, url: str, version: str | None) -> str | None:
        """Poll a replica, and probe it if it is late. Raises on failure of both."""
        try:
            return await self._poll(url, version)
        except TimeoutError:
            await self._probe(url)
        known = version if url in self._up else None
        self._gain(url)
        return known

    async def _probe(self, url: str) -> None:
        """Ask a replica whether it is ready. Raises on failure."""
        assert self._session is not None, "the fleet is open"
        async with asyncio.timeout(_LATE_SECONDS), self._session.get(f"{url}/ready") as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}")

    async def _poll(self, url: str, version: str | None) -> str | None:
        """Read the holdings of a replica; returns their version, if known. Raises on failure."""
        assert self._session is not None, "the fleet is open"
        headers = {"Authorization": f"Bearer {self.operator_key}"} if self.operator_key else {}
        query = {"wait": "0"}
        if version is not None:
            query = {"wait": str(POLL_SECONDS), "after": version}
        async with asyncio.timeout(POLL_SECONDS + _LATE_SECONDS):
            async with self._session.get(
                f"{url}/v1/holdings", params=query, headers=headers
            ) as response:
                if response.status == 200:
                    content = await response.json()
                    if content["documents"] is not None:
                        self.router.report(url, content["documents"])
                    elif url not in self._up:
                        # a failed call has dropped the documents of this version
                        return None
                    self._gain(url)
                    return str(content["version"])
                if response.status not in (401, 403, 404):
                    raise ValueError(f"status {response.status}")
                reason = response.status
            await self._probe(url)
            if url not in self._up:
                self.log.warning("replica_without_holdings", url=url, status=reason)
            self._gain(url)
            return None

    def _gain(self, url: str) -> None:
        if url not in self._up:
            self._up.add(url)
            self.metrics.up.set(len(self._up))
            self.log.info("replica_up", url=url)

    def _lose(self, url: str, reason: str) -> None:
        if url in self._up:
            self._up.discard(url)
            # the loads stay, because requests in flight still end
            self.router.report(url, {})
            self.metrics.up.set(len(self._up))
            self.log.warning("replica_lost", url=url, reason=reason)
