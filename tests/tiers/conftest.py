from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looseleaf.tiers import DiskTier, HostTier, Ledger, RemoteTier, Tier
from tests.tiers.redis_server import redis_server, shared_redis

__all__ = ["redis_server", "shared_redis", "tier"]


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
