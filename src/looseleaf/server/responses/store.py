"""The stored responses of a server, for the coroutines of one process."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from looseleaf.server.responses.table import ResponseTable


@runtime_checkable
class ResponseStore(Protocol):
    """Records by tenant and id, as in `ResponseTable`."""

    async def put(self, tenant: str, name: str, content: bytes, previous: str | None) -> bool:
        """Keep a record; whether it fits, with the conversation before it."""
        ...

    async def get(self, tenant: str, name: str) -> bytes | None:
        """The content of a record, None without one."""
        ...

    async def chain(self, tenant: str, name: str) -> list[bytes] | None:
        """The contents of a record and of all before it, the first first; None if one is gone."""
        ...

    async def delete(self, tenant: str, name: str) -> bool:
        """Drop a record; whether there was one."""
        ...


@dataclass(frozen=True)
class LocalStore:
    """The store of a server of one process."""

    table: ResponseTable

    async def put(self, tenant: str, name: str, content: bytes, previous: str | None) -> bool:
        return self.table.put(tenant, name, content, previous)

    async def get(self, tenant: str, name: str) -> bytes | None:
        return self.table.get(tenant, name)

    async def chain(self, tenant: str, name: str) -> list[bytes] | None:
        return self.table.chain(tenant, name)

    async def delete(self, tenant: str, name: str) -> bool:
        return self.table.delete(tenant, name)
