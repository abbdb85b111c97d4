"""A Redis server of the tests' own: on loopback, on a free port, nothing kept on disk."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


def find_redis() -> str:
    """The server's path; skips the test without one, or fails it where REQUIRE_REDIS=1."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found:
        return found
    message = "no redis-server on the PATH: install Debian's package redis-server"
    if os.environ.get("REQUIRE_REDIS") == "1":
        pytest.fail(message)
    return pytest.skip(message)


@dataclass(eq=False)
class RedisServer:
    """A server that can be killed and started again, empty, on the same port."""

    executable: str
    port: int
    process: "subprocess.Popen[bytes] | None" = None

    @classmethod
    def on_a_free_port(cls) -> "RedisServer":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return cls(find_redis(), probe.getsockname()[1])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [self.executable, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--appendonly", "no", *options],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + 10
        while time.monotonic() < end:
            assert self.process.poll() is None, "the server ended at once"
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except ConnectionRefusedError:
                continue
            return
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    server = RedisServer.on_a_free_port()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """A server that is empty."""
    import redis

    client = redis.Redis(port=shared_redis.port)
    client.flushall()
    client.close()
    return shared_redis
