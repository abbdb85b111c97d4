"""The Redis server of `tools.fuzz`, and damage to its values: flipped bits, cuts, lost fields, the
value of one record under the name of another, and values of other programs.

The server runs on the loopback, on a free port, and keeps nothing on disk."""

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from looseleaf.errors import InvalidOption
from looseleaf.tiers.stores.remote import PREFIX

_NAMES = f"{PREFIX}segment:*"
_START_SECONDS = 30.0


@dataclass(eq=False)
class RedisServer:
    """A server that has started, and a client for it."""

    process: "subprocess.Popen[bytes]"
    url: str
    client: Any

    @classmethod
    def start(cls) -> "RedisServer | None":
        """None where no server, or no client, is installed."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        try:
            import redis
        except ImportError:
            return None
        if program is None:
            return None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        process = subprocess.Popen([*command, "--appendonly", "no"], stdout=subprocess.DEVNULL)
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > end:
                    process.kill()
                    raise InvalidOption(f"{program} does not start: start it by hand") from error
                time.sleep(0.01)
        url = f"redis://127.0.0.1:{port}/0"
        return cls(process, url, redis.Redis.from_url(url))

    def empty(self) -> None:
        """Drop all values."""
        self.client.flushall()

    def damage(self, draw: random.Random, share: float = 0.5) -> int:
        """Damage a share of the records; returns how many."""
        names = sorted(self.client.scan_iter(match=_NAMES))
        damaged = 0
        for name in names:
            if draw.random() < share:
                damage = draw.choice(DAMAGES)
                damage(self.client, name, draw.choice(names), draw)
                damaged += 1
        return damaged

    def close(self) -> None:
        """End the server."""
        self.client.close()
        self.process.terminate()
        self.process.wait()


def _flip(client: Any, name: bytes, other: bytes, draw: random.Random) -> None:
    field, content = _field(client, name, draw)
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        client.hset(name, field, bytes(content))


def _cut(client: Any, name: bytes, other: bytes, draw: random.Random) -> None:
    field, content = _field(client, name, draw)
    if content:
        client.hset(name, field, bytes(content[: draw.randrange(len(content))]))


def _lose(client: Any, name: bytes, other: bytes, draw: random.Random) -> None:
    field, content = _field(client, name, draw)
    if content:
        client.hdel(name, field)


def _swap(client: Any, name: bytes, other: bytes, draw: random.Random) -> None:
    """The whole value of another record."""
    if name != other and client.exists(other):
        client.copy(other, name, replace=True)


def _mix(client: Any, name: bytes, other: bytes, draw: random.Random) -> None:
    """One layer of another record, or another layer of the same."""
    field, content = _field(client, name, draw)
    _, others = _field(client, other, draw)
    if content and others:
        client.hset(name, field, bytes(others))


def _foreign(client: Any, name: bytes, other: bytes, draw: random.Random) -> None:
    """A value of another program, of any type."""
    client.delete(name)
    kind = draw.choice(("string", "list", "set", "hash", "header", "sorted set"))
    if kind == "string":
        client.set(name, draw.randbytes(draw.randrange(200)))
    elif kind == "list":
        client.rpush(name, b"a", b"b")
    elif kind == "set":
        client.sadd(name, b"a")
    elif kind == "sorted set":
        client.zadd(name, {b"a": 1.0})
    elif kind == "hash":
        client.hset(name, mapping={b"user": b"7", b"0": draw.randbytes(50)})
    else:
        client.hset(name, b"header", draw.randbytes(draw.randrange(300)))


def _field(client: Any, name: bytes, draw: random.Random) -> tuple[bytes, bytearray]:
    """One field of a record; empty where it is none any more."""
    if client.type(name) != b"hash":
        return b"", bytearray()
    field = draw.choice(sorted(client.hkeys(name)))
    return field, bytearray(client.hget(name, field) or b"")


DAMAGES: tuple[Callable[[Any, bytes, bytes, random.Random], None], ...] = (
    _flip,
    _cut,
    _lose,
    _swap,
    _mix,
    _foreign,
)
"""Damage to the record ``name``, perhaps with the value of ``other``."""
