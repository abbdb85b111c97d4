"""Sends a request to replicas until one answers, as long as the client has received nothing.

A replica that ends before its first byte costs a retry. So does one that is busy (429
``queue_full``), unavailable (503), or without a registered document (404). A document whose
registration is known is sent to the replica first. A stored response is looked for at all replicas.

A replica that has the request and stays silent costs no retry, since others would need as long.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from looseleaf.proxy.fleet import (
    Call,
    Fleet,
    Headers,
    ReplicaLost,
    ReplicaSilent,
    Reply,
    read_all,
)
from looseleaf.proxy.metrics import ProxyMetrics
from looseleaf.proxy.registered import RegisteredBodies
from looseleaf.router import Affinity
from looseleaf.server.errors import ApiError, unavailable

EVENT_STREAM = "text/event-stream"
_NO_RESPONSE = "response_not_found"


@dataclass(frozen=True)
class Answer:
    """A response whose first bytes have arrived. ``rest`` is empty unless it is a stream."""

    replica: str
    status: int
    headers: Headers
    first: bytes
    reply: Reply | None = field(default=None, repr=False)
    rest: AsyncIterator[bytes] | None = field(default=None, repr=False)

    @property
    def error_code(self) -> str | None:
        """The code of an error response."""
        if self.status < 400:
            return None
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            code = json.loads(self.first)["error"]["code"]
            return code if isinstance(code, str) else None
        return None

    async def close(self) -> None:
        """End the call to the replica."""
        if self.reply is not None:
            await self.reply.close()


@dataclass(frozen=True)
class Forwarder:
    """Forwards calls to a fleet."""

    fleet: Fleet
    registered: RegisteredBodies
    metrics: ProxyMetrics

    async def forward(self, call: Call, affinity: Affinity) -> Answer:
        """The first useful answer, else the last refusal. Raises ApiError without any."""
        order = self.fleet.order(affinity)
        answer = await self._first_useful(order, call, affinity)
        if answer is not None and answer.error_code == _NO_RESPONSE:
            # a fleet may leave the choice of a replica to its router
            unnamed = [name for name in self.fleet.everyone() if name not in order]
            answer = await self._first_useful(unnamed, call, affinity) or answer
        if answer is not None:
            return answer
        raise unavailable(
            "no replica answers: nothing was generated, so send the request again in a moment",
            "no_replica",
        )

    async def _first_useful(
        self, replicas: Sequence[str], call: Call, affinity: Affinity
    ) -> Answer | None:
        """The first useful answer, else the last refusal; None if all replicas are lost."""
        refusal = None
        for replica in replicas:
            try:
                answer = await self._attempt(replica, call, affinity)
            except ReplicaSilent as error:
                raise _silent(error) from error
            except ReplicaLost:
                self.metrics.retries.labels("lost").inc()
                continue
            reason = _refusal(answer, affinity)
            if reason is None:
                return answer
            refusal = answer
            self.metrics.retries.labels(reason).inc()
        return refusal

    async def broadcast(self, call: Call) -> list[Answer]:
        """The answers of all replicas that are not lost."""
        answers = [await self.ask(replica, call) for replica in self.fleet.everyone()]
        return [answer for answer in answers if answer is not None]

    async def ask(self, replica: str, call: Call) -> Answer | None:
        """The answer of one replica, None if it is lost."""
        with suppress(ReplicaLost):
            return await self._send(replica, call, Affinity())
        return None

    async def _attempt(self, replica: str, call: Call, affinity: Affinity) -> Answer:
        answer = await self._send(replica, call, affinity)
        if answer.error_code != "document_not_found":
            return answer
        if not await self._supply(answer.replica, call, affinity):
            return answer
        return await self._send(answer.replica, call, affinity)

    async def _send(self, replica: str, call: Call, affinity: Affinity) -> Answer:
        """The answer of one replica: of a stream the first chunk, of others the whole body."""
        reply = await self.fleet.send(replica, call, affinity)
        self.metrics.sent.labels(reply.replica).inc()
        if not _is_stream(reply.headers):
            body = await read_all(reply)
            return Answer(reply.replica, reply.status, reply.headers, body)
        chunks = reply.chunks()
        try:
            first = await anext(chunks, b"")
        except BaseException:
            await reply.close()
            raise
        return Answer(reply.replica, reply.status, reply.headers, first, reply, chunks)

    async def _supply(self, replica: str, call: Call, affinity: Affinity) -> bool:
        """Send a request's registered documents to a replica; whether all registrations worked."""
        bodies = [self.registered.get(call.key, name) for name in affinity.registered]
        if not bodies or None in bodies:
            return False
        for body in bodies:
            assert body is not None
            registration = call.to("POST", "/v1/documents", body)
            answer = await self._send(replica, registration, Affinity())
            if answer.status >= 300:
                return False
            self.metrics.resent.inc()
        return True


def _silent(error: ReplicaSilent) -> ApiError:
    """A 504; clients that repeat it by themselves would only wait again."""
    return ApiError(
        504,
        f"{error}: stream the answer or lower its max_tokens, or raise the proxy's "
        "--silence-seconds above the servers' --deadline",
        code="replica_silent",
        headers={"x-should-retry": "false"},
    )


def _is_stream(headers: Headers) -> bool:
    return any(
        name.lower() == "content-type" and value.startswith(EVENT_STREAM) for name, value in headers
    )


def _refusal(answer: Answer, affinity: Affinity) -> str | None:
    """Why another replica may give a better answer; None if none can."""
    if answer.status == 503:
        return "unavailable"
    code = answer.error_code
    if answer.status == 429 and code == "queue_full":
        return "busy"
    if code == _NO_RESPONSE or (code == "document_not_found" and affinity.registered):
        return "missing"
    return None
