"""KV events: which pages of prompt prefixes the pool holds, published over ZeroMQ for routers.

The messages are those of `vllm.distributed.kv_events`: MessagePack arrays of ``BlockStored``,
``BlockRemoved`` and ``AllBlocksCleared``, one batch per step, after a topic and a sequence number.
A block is a page, and its hash the first 8 bytes of the page's key. Only pages that begin at the
prompt's first token are published: leads, system prompts and plain prefixes. Pages of salted
requests are private and not published."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from looseleaf.config import CacheConfig
from looseleaf.errors import InvalidOption, install
from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.store import SegmentStore

_BOUND_SCHEMES = ("ipc://", "inproc://")
_MAX_UNSENT = 100_000
"""Batches that wait for one slow subscriber; later ones are lost to it."""


@runtime_checkable
class Publisher(Protocol):
    """Publishes batches of events; an event is its type's name, then its fields."""

    def publish(self, events: list[list[Any]]) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class KvEvents:
    """Collects the events of a step; `flush` publishes them. For the engine's thread."""

    publisher: Publisher
    page_size: int
    _published: set[SegmentKey] = field(default_factory=set)
    _events: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # subscribers forget the blocks of an earlier process at this endpoint
        self._events.append(["AllBlocksCleared"])

    def stored(self, key: SegmentKey, parent: SegmentKey | None, tokens: Sequence[int]) -> None:
        """A full page of a prefix is in the pool; ``parent`` is the page before it."""
        if key in self._published:
            return
        self._published.add(key)
        before = None if parent is None else _block(parent)
        last = self._events[-1] if self._events else None
        if last is not None and last[0] == "BlockStored" and last[1][-1] == before:
            last[1].append(_block(key))
            last[3].extend(tokens)
            return
        # hashes, parent, tokens, block size, LoRA id, medium
        event = ["BlockStored", [_block(key)], before, [*tokens], self.page_size, None, "GPU"]
        self._events.append(event)

    def removed(self, key: SegmentKey) -> None:
        """A segment has left the pool."""
        if key not in self._published:
            return
        self._published.discard(key)
        if self._events and self._events[-1][0] == "BlockRemoved":
            self._events[-1][1].append(_block(key))
        else:
            self._events.append(["BlockRemoved", [_block(key)], "GPU"])

    def flush(self) -> None:
        """Publish the collected events, if any."""
        if self._events:
            events, self._events = self._events, []
            self.publisher.publish(events)


class ZmqPublisher:
    """A PUB socket. An endpoint with ``*``, or of a file, is bound; others are connected to.

    Raises InvalidOption for an invalid endpoint, and without the packages."""

    def __init__(self, endpoint: str, topic: bytes = b"") -> None:
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise InvalidOption(
                f"kv_events needs {error.name}: {install('events')}", "kv_events"
            ) from error
        self._encode, self._topic, self._number = msgspec.msgpack.encode, topic, 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.sndhwm, self._socket.linger = _MAX_UNSENT, 0
        binds = "*" in endpoint or endpoint.startswith(_BOUND_SCHEMES)
        try:
            (self._socket.bind if binds else self._socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InvalidOption(
                f"kv_events {endpoint!r} is no endpoint that can be used ({error}): write "
                "tcp://*:PORT, ipc://FILE, or tcp://HOST:PORT of a subscriber that is bound",
                "kv_events",
            ) from error

    def publish(self, events: list[list[Any]]) -> None:
        """Send one batch. It never waits: a subscriber that lags loses batches."""
        # time, events, rank of data parallelism
        payload = self._encode([time.time(), events, 0])
        self._socket.send_multipart([self._topic, self._number.to_bytes(8, "big"), payload])
        self._number += 1

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()


def make_kv_events(config: CacheConfig, store: SegmentStore) -> KvEvents | None:
    """The events of a store at the configured endpoint; None without one. Raises InvalidOption."""
    if config.kv_events is None:
        return None
    events = KvEvents(ZmqPublisher(config.kv_events), config.page_size)
    store.on_drop = events.removed
    return events


def _block(key: SegmentKey) -> int:
    """The hash of a page, an unsigned number of 64 bits."""
    return int.from_bytes(key[:8], "big")
