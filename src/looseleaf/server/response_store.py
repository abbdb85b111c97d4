"""Stored responses in memory: the records of all tenants, within a number of bytes.

Above the limit the tenant with the most bytes loses its oldest record, so a tenant with few
records keeps them. A record names the response before it; a use of a record renews those before it,
so that the end of a conversation is dropped before its beginning."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from looseleaf.config import ServerConfig

RECORD_BYTES = 512
"""Bytes that count for a record besides its content."""


@dataclass(frozen=True)
class Stored:
    """A record and the id of the response before it."""

    content: bytes
    previous: str | None

    @property
    def size(self) -> int:
        """Bytes that count for the limit."""
        return len(self.content) + RECORD_BYTES


_Records = OrderedDict[str, Stored]


@dataclass(eq=False)
class ResponseTable:
    """Records by tenant and id."""

    max_bytes: int
    _tenants: dict[str, _Records] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ServerConfig) -> "ResponseTable":
        """An empty table of a server."""
        return cls(int(config.stored_responses_mib * 2**20))

    @property
    def size(self) -> int:
        """Bytes of all records."""
        return sum(self._sizes.values())

    def put(self, tenant: str, name: str, content: bytes, previous: str | None) -> bool:
        """Keep a record; whether it fits, with the conversation before it."""
        stored = Stored(content, previous)
        if stored.size > self.max_bytes:
            return False
        self.delete(tenant, name)
        self._tenants.setdefault(tenant, OrderedDict())[name] = stored
        self._sizes[tenant] = self._sizes.get(tenant, 0) + stored.size
        self._touch(tenant, name)
        while self.size > self.max_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.delete(largest, next(iter(self._tenants[largest])))
        return name in self._records(tenant)

    def get(self, tenant: str, name: str) -> bytes | None:
        """The content of a record, None without one."""
        stored = self._records(tenant).get(name)
        if stored is None:
            return None
        self._touch(tenant, name)
        return stored.content

    def chain(self, tenant: str, name: str) -> list[bytes] | None:
        """The contents of a record and of all before it, the first first; None if one is gone."""
        records = self._records(tenant)
        contents: list[bytes] = []
        following: str | None = name
        while following is not None:
            stored = records.get(following)
            if stored is None:
                return None
            contents.append(stored.content)
            following = stored.previous
        self._touch(tenant, name)
        return contents[::-1]

    def delete(self, tenant: str, name: str) -> bool:
        """Drop a record; whether there was one."""
        records = self._records(tenant)
        stored = records.pop(name, None)
        if stored is None:
            return False
        self._sizes[tenant] -= stored.size
        if not records:
            del self._tenants[tenant], self._sizes[tenant]
        return True

    def _records(self, tenant: str) -> _Records:
        return self._tenants.get(tenant, OrderedDict())

    def _touch(self, tenant: str, name: str) -> None:
        records = self._tenants[tenant]
        following: str | None = name
        while following is not None and following in records:
            records.move_to_end(following)
            following = records[following].previous


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
