"""Stored responses of a server of several processes: the parent has the table."""

import asyncio
from dataclasses import dataclass, field
from itertools import count

from looseleaf.server.processes.control import Control, Store, Stored, StoreMethod
from looseleaf.server.response_store import ResponseTable

MAX_CALLS = 4
"""Calls of one process in flight. An answer can be as long as all stored responses."""


@dataclass(eq=False)
class RemoteStore:
    """The store of an API process, which calls its parent over the control socket.

    At most `MAX_CALLS` are in flight, which bounds the answers that the parent queues."""

    control: Control
    _numbers: "count[int]" = field(default_factory=count)
    _calls: dict[int, "asyncio.Future[Stored]"] = field(default_factory=dict)
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CALLS))

    async def put(self, tenant: str, name: str, content: bytes, previous: str | None) -> bool:
        return (await self._call("put", tenant, name, content, previous)).is_done

    async def get(self, tenant: str, name: str) -> bytes | None:
        contents = (await self._call("get", tenant, name)).contents
        return contents[0] if contents else None

    async def chain(self, tenant: str, name: str) -> list[bytes] | None:
        return (await self._call("chain", tenant, name)).contents

    async def delete(self, tenant: str, name: str) -> bool:
        return (await self._call("delete", tenant, name)).is_done

    def take(self, answer: Stored) -> None:
        """Complete the call that the parent has answered."""
        # after an answer, not after a call: the parent answers cancelled calls too
        self._room.release()
        call = self._calls.pop(answer.number, None)
        if call is not None and not call.done():
            call.set_result(answer)

    async def _call(
        self,
        method: StoreMethod,
        tenant: str,
        name: str,
        content: bytes = b"",
        previous: str | None = None,
    ) -> Stored:
        await self._room.acquire()
        number = next(self._numbers)
        call = self._calls[number] = asyncio.get_running_loop().create_future()
        self.control.send(Store(number, method, tenant, name, content, previous))
        try:
            answer: Stored = await call
            return answer
        finally:
            self._calls.pop(number, None)


def answer_store(table: ResponseTable, call: Store) -> Stored:
    """The result of a process's call."""
    if call.method == "put":
        kept = table.put(call.tenant, call.name, call.content, call.previous)
        return Stored(call.number, is_done=kept)
    if call.method == "delete":
        return Stored(call.number, is_done=table.delete(call.tenant, call.name))
    if call.method == "chain":
        return Stored(call.number, table.chain(call.tenant, call.name))
    content = table.get(call.tenant, call.name)
    return Stored(call.number, None if content is None else [content])
