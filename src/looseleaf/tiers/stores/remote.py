"""Records in a Redis or Valkey server that several engines and machines share.

A record is one hash with a field for its header and one per layer. It is written under a temporary
name and renamed, so it is complete or absent. The server decides about evictions
(``maxmemory-policy``). Needs the package ``redis``."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.errors import InvalidOption, install
from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Entry, Fault, Record, TierCounters, TierFault
from looseleaf.tiers.stores.files import (
    RecordHeader,
    decode_record,
    encode_record,
    raw,
)

PREFIX = "looseleaf:1:"
_HEADER = "header"
# expiry of an interrupted write
_UNFINISHED_SECONDS = 120
_WAITING, _BYTES = "leave it out, and set tier_timeout", "leave it out: values are bytes"
_ONCE = "leave it out: a failed call is not repeated, and the tier is retried later"
_NOT_IN_URL = {
    "socket_timeout": _WAITING,
    "socket_connect_timeout": _WAITING,
    "decode_responses": _BYTES,
    "encoding": _BYTES,
    "encoding_errors": _BYTES,
    **dict.fromkeys(("retry", "retry_on_timeout", "retry_on_error"), _ONCE),
}


@dataclass(eq=False)
class RemoteTier:
    """Records in the server at ``url`` (``redis://host:port/db``, ``rediss://…``).

    ``timeout`` bounds each reply, in seconds; ``ttl`` is in seconds, None for no expiry. The
    connection opens on first use, so the server may start later. Raises InvalidOption for an
    invalid URL, and without the package."""

    url: str
    timeout: float = 5.0
    ttl: float | None = None
    name: str = "remote"
    counters: TierCounters = field(default_factory=TierCounters)

    def __post_init__(self) -> None:
        self._redis = _connect(self.url, self.timeout)
        self._client_id, self._counter = uuid4().hex, count()

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """Whether each record exists, in one round trip."""
        with _faults():
            pipe = self._redis.pipeline(transaction=False)
            for key in keys:
                pipe.exists(_name(key))
            return [bool(exists) for exists in pipe.execute()]

    def open(self, key: SegmentKey) -> "RemoteReader | None":
        """A reader of the record after its header is checked. A damaged record is deleted."""
        try:
            with _faults():
                header = self._redis.hget(_name(key), _HEADER)
                if header is None:
                    # a hash without a header is unreadable and would block writers
                    self._redis.delete(_name(key))
                    return None
            return RemoteReader(self, decode_record(header, key))
        except TierFault as fault:
            if fault.kind == "damaged":
                self.delete([key])
            raise

    def put(self, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        """Writes a record layer by layer, then renames it."""
        name = _name(record.key)
        unfinished = f"{PREFIX}unfinished:{self._client_id}:{next(self._counter)}"
        with _faults():
            if self._redis.exists(name):
                return False
            header = encode_record(record, layers)
            try:
                self._redis.hset(unfinished, _HEADER, header)
                for layer in range(record.num_layers):
                    # renewed per layer, or a long record would expire while it is written
                    self._redis.expire(unfinished, _UNFINISHED_SECONDS)
                    content = raw(layers[layer].contiguous())
                    self._redis.hset(unfinished, str(layer), content)
                if self.ttl is None:
                    self._redis.persist(unfinished)
                else:
                    self._redis.pexpire(unfinished, max(1, int(1000 * self.ttl)))
                self._redis.rename(unfinished, name)
            except BaseException:
                self._delete_quietly(unfinished)
                raise
        self.counters.stored += 1
        self.counters.bytes_written += len(header) + record.num_bytes
        return True

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        if not keys:
            return 0
        with _faults():
            return int(self._redis.delete(*map(_name, keys)))

    def entries(self) -> Iterable[Entry]:
        """All records, unordered, without their time of creation."""
        with _faults():
            for name in self._redis.scan_iter(match=f"{PREFIX}segment:*", count=1000):
                key = _key(name)
                entry = None if key is None else self._entry(key)
                if entry is not None:
                    yield entry

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        """A pinned record does not expire; the server may still evict it."""
        with _faults():
            if pinned or self.ttl is None:
                self._redis.persist(_name(key))
            else:
                self._redis.pexpire(_name(key), max(1, int(1000 * self.ttl)))

    def close(self) -> None:
        self._redis.close()

    def read_field(self, key: SegmentKey, layer: int) -> bytes | None:
        """The stored bytes of a layer."""
        with _faults():
            content: bytes | None = self._redis.hget(_name(key), str(layer))
            return content

    def verify(self) -> Iterator[tuple[str, TierFault | None]]:
        """Reads every record; yields its name and its fault, None if sound."""
        for entry in list(self.entries()):
            problem = None
            try:
                reader = self.open(entry.key)
                if reader is not None:
                    into = torch.empty(reader.record.layer_bytes, dtype=torch.uint8)
                    for layer in range(reader.record.num_layers):
                        reader.read(layer, into)
            except TierFault as fault:
                if fault.kind not in ("damaged", "missing"):
                    raise
                problem = fault
            yield entry.key.hex(), problem

    def discard(self, names: Iterable[str]) -> None:
        """Deletes records by the names of `verify`."""
        self.delete([SegmentKey(bytes.fromhex(name)) for name in names])

    def claim(self, key: SegmentKey, owner: str, seconds: float) -> bool:
        """Announce that ``owner`` computes a segment; False while another's claim is valid.

        The server drops a claim that is not renewed within ``seconds``."""
        name, milliseconds = f"{PREFIX}claim:{key.hex()}", max(1, int(1000 * seconds))
        with _faults():
            if self._redis.set(name, owner, nx=True, px=milliseconds):
                return True
            if self._redis.get(name) != owner.encode():
                return False
            # an owner renews long before the end, so no other claim lies between both calls
            return bool(self._redis.pexpire(name, milliseconds))

    def release(self, key: SegmentKey, owner: str) -> None:
        """End a claim of ``owner``."""
        name = f"{PREFIX}claim:{key.hex()}"
        with _faults():
            if self._redis.get(name) == owner.encode():
                self._redis.delete(name)

    def _entry(self, key: SegmentKey) -> Entry | None:
        """The entry of a key, also for a damaged value; None without a header."""
        header = b""
        try:
            with _faults():
                header = self._redis.hget(_name(key), _HEADER)
            if header is None:
                return None
            record = decode_record(header, key).record
        except TierFault as fault:
            if fault.kind != "damaged":
                raise
            return Entry(key, len(header))
        return Entry(key, len(header) + record.num_bytes, record.tenant)

    def _delete_quietly(self, name: str) -> None:
        try:
            with _faults():
                self._redis.delete(name)
        except TierFault:
            # it expires
            return


@dataclass(frozen=True)
class RemoteReader:
    """A record on the server, which may evict it at any time."""

    tier: RemoteTier
    header: RecordHeader

    @property
    def record(self) -> Record:
        return self.header.record

    def read(
        self, layer: int, into: UInt8[Tensor, " layer_bytes"]
    ) -> UInt8[Tensor, " layer_bytes"]:
        """Reads and checks a layer. A damaged record is deleted."""
        key = self.record.key
        try:
            content = self.tier.read_field(key, layer)
            if content is None:
                raise TierFault("missing", f"the server has dropped layer {layer}")
            if len(content) != self.record.layer_bytes:
                raise TierFault("damaged", f"layer {layer} is not as long as it was")
            into.numpy()[:] = memoryview(content)
            self.header.check_layer(layer, into)
        except TierFault as fault:
            if fault.kind in ("damaged", "missing"):
                # a remaining header would block writers
                self.tier.delete([key])
            raise
        return into

    def close(self) -> None:
        """Does nothing: the connection stays open."""


def _name(key: SegmentKey) -> str:
    return f"{PREFIX}segment:{key.hex()}"


def _key(name: bytes) -> SegmentKey | None:
    """The segment key of a record name; None for a foreign name."""
    try:
        key = SegmentKey(bytes.fromhex(name.decode().rpartition(":")[2]))
    except ValueError:
        return None
    return key if _name(key).encode() == name else None


def _connect(url: str, timeout: float) -> Any:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise InvalidOption(f"a remote tier needs the package redis: {install('redis')}") from error
    try:
        for name in parse_qs(urlsplit(url).query, keep_blank_values=True):
            if name in _NOT_IN_URL:
                raise InvalidOption(f"the remote tier's URL can't have {name}: {_NOT_IN_URL[name]}")
        client = redis.Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            # the breaker decides about retries
            retry=Retry(NoBackoff(), 0),
        )
        # validates the options without a connection
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)
        return client
    except InvalidOption:
        raise
    except (TypeError, ValueError, redis.RedisError) as error:
        raise InvalidOption(
            f"the remote tier's URL can't be read ({error}): write redis://HOST:PORT/DATABASE"
        ) from error


@contextmanager
def _faults() -> Iterator[None]:
    """Converts client errors to TierFault."""
    from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
    from redis.exceptions import TimeoutError as RedisTimeout

    try:
        yield
    except RedisTimeout as error:
        raise TierFault("timeout", f"remote: {error}") from error
    except OutOfMemoryError as error:
        raise TierFault("full", f"remote: {error}") from error
    except ResponseError as error:
        # a foreign value has the name of a record; the server is sound
        kind: Fault = "damaged" if str(error).startswith("WRONGTYPE") else "unavailable"
        raise TierFault(kind, f"remote: {error}") from error
    except (RedisError, OSError) as error:
        raise TierFault("unavailable", f"remote: {error}") from error
