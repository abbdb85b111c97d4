"""Segments in a Redis or Valkey server, for several engines and machines to share.

A record is one hash: its header, and a field for every layer. It is filled under another name and
renamed, so it is there whole or not at all. What the server evicts is its own business
(``maxmemory-policy``); how long records live is told to it. Needs the package ``redis``."""

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
# what a write that was cut off leaves behind is gone after this many seconds
_UNFINISHED_SECONDS = 120
_WAITING, _BYTES = "leave it out, and set tier_timeout", "leave it out: what is stored is bytes"
_ONCE = "leave it out: whoever asks goes on without an answer, and it is tried again later"
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

    ``timeout`` in seconds is for every answer of the server; ``ttl`` in seconds, None for ever. The
    connection is made when it is needed, so a server may come later. Raises InvalidOption for a
    URL that can't be read, and without the package."""

    url: str
    timeout: float = 5.0
    ttl: float | None = None
    name: str = "remote"
    counters: TierCounters = field(default_factory=TierCounters)

    def __post_init__(self) -> None:
        self._redis = _connect(self.url, self.timeout)
        self._own, self._numbers = uuid4().hex, count()

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """Which of the records are there, in one turn."""
        with _faults():
            pipe = self._redis.pipeline(transaction=False)
            for key in keys:
                pipe.exists(_name(key))
            return [bool(found) for found in pipe.execute()]

    def open(self, key: SegmentKey) -> "RemoteReader | None":
        """The record, if its header is sound. A damaged one is dropped."""
        try:
            with _faults():
                header = self._redis.hget(_name(key), _HEADER)
                if header is None:
                    # what is without one can't be read, and must not keep others from writing it
                    self._redis.delete(_name(key))
                    return None
            return RemoteReader(self, decode_record(header, key))
        except TierFault as fault:
            if fault.kind == "damaged":
                self.delete([key])
            raise

    def put(self, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        """Send a record layer by layer, then give it its name."""
        name = _name(record.key)
        unfinished = f"{PREFIX}unfinished:{self._own}:{next(self._numbers)}"
        with _faults():
            if self._redis.exists(name):
                return False
            header = encode_record(record, layers)
            try:
                self._redis.hset(unfinished, _HEADER, header)
                for layer in range(record.num_layers):
                    # from layer to layer, or a long record is half gone before it is whole
                    self._redis.expire(unfinished, _UNFINISHED_SECONDS)
                    content = raw(layers[layer].contiguous())
                    self._redis.hset(unfinished, str(layer), content)
                if self.ttl is None:
                    self._redis.persist(unfinished)
                else:
                    self._redis.pexpire(unfinished, max(1, int(1000 * self.ttl)))
                self._redis.rename(unfinished, name)
            except BaseException:
                self._forget(unfinished)
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
        """All records, in no particular order; their time of creation is not known."""
        with _faults():
            for name in self._redis.scan_iter(match=f"{PREFIX}segment:*", count=1000):
                key = _key(name)
                entry = None if key is None else self._entry(key)
                if entry is not None:
                    yield entry

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        """A pinned record does not expire; the server may still evict it for want of memory."""
        with _faults():
            if pinned or self.ttl is None:
                self._redis.persist(_name(key))
            else:
                self._redis.pexpire(_name(key), max(1, int(1000 * self.ttl)))

    def close(self) -> None:
        self._redis.close()

    def read_field(self, key: SegmentKey, layer: int) -> bytes | None:
        """The bytes of a layer as the server has them."""
        with _faults():
            content: bytes | None = self._redis.hget(_name(key), str(layer))
            return content

    def verify(self) -> Iterator[tuple[str, TierFault | None]]:
        """Read every record: its name, and what is wrong with it, None if nothing is."""
        for entry in list(self.entries()):
            wrong = None
            try:
                reader = self.open(entry.key)
                if reader is not None:
                    into = torch.empty(reader.record.layer_bytes, dtype=torch.uint8)
                    for layer in range(reader.record.num_layers):
                        reader.read(layer, into)
            except TierFault as fault:
                if fault.kind not in ("damaged", "missing"):
                    raise
                wrong = fault
            yield entry.key.hex(), wrong

    def discard(self, names: Iterable[str]) -> None:
        """Delete records by the names that `verify` gives."""
        self.delete([SegmentKey(bytes.fromhex(name)) for name in names])

    def _entry(self, key: SegmentKey) -> Entry | None:
        """What the server has under a segment's name, a record or not; None without a header."""
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

    def _forget(self, name: str) -> None:
        try:
            with _faults():
                self._redis.delete(name)
        except TierFault:
            # it goes by itself when its time is over
            return


@dataclass(frozen=True)
class RemoteReader:
    """A record at the server, which may lose it at any time."""

    tier: RemoteTier
    header: RecordHeader

    @property
    def record(self) -> Record:
        return self.header.record

    def read(
        self, layer: int, into: UInt8[Tensor, " layer_bytes"]
    ) -> UInt8[Tensor, " layer_bytes"]:
        """The layer from the server, if it is what was stored; a damaged record is dropped."""
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
                # while it has a header nobody would write it anew
                self.tier.delete([key])
            raise
        return into

    def close(self) -> None:
        """The connection goes on."""


def _name(key: SegmentKey) -> str:
    return f"{PREFIX}segment:{key.hex()}"


def _key(name: bytes) -> SegmentKey | None:
    """The segment whose record has that name; None if it is somebody else's."""
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
            # whoever asks goes on without it, and a breaker decides when to try again
            retry=Retry(NoBackoff(), 0),
        )
        # it does not connect, but knows the options
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
    """What the client raises, as a TierFault."""
    from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
    from redis.exceptions import TimeoutError as RedisTimeout

    try:
        yield
    except RedisTimeout as error:
        raise TierFault("timeout", f"remote: {error}") from error
    except OutOfMemoryError as error:
        raise TierFault("full", f"remote: {error}") from error
    except ResponseError as error:
        # somebody else's value has the name of a record: no reason to leave the server alone
        kind: Fault = "damaged" if str(error).startswith("WRONGTYPE") else "unavailable"
        raise TierFault(kind, f"remote: {error}") from error
    except (RedisError, OSError) as error:
        raise TierFault("unavailable", f"remote: {error}") from error
