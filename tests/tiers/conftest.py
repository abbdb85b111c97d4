from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looseleaf.tiers import DiskTier, HostTier, Ledger, RemoteTier, Tier
from tests.tiers.redis_server import RedisServer


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


@pytest.fixture(params=["host", "disk", "remote"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made: Any
    if request.param == "host":
        made = HostTier(Ledger(1 << 20))
    elif request.param == "disk":
        made = DiskTier(tmp_path / "cache", Ledger(1 << 20))
    else:
        made = RemoteTier(request.getfixturevalue("redis_server").url, timeout=5.0)
    yield made
    made.close()
