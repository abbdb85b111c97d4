from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looseleaf.tiers import DiskTier, HostTier, Ledger, RemoteTier, Tier
from looseleaf.tiers.stores.objects import ObjectTier
from tests.tiers.redis_server import redis_server, shared_redis
from tests.tiers.s3_server import moto_server, s3_server

__all__ = ["moto_server", "redis_server", "s3_server", "shared_redis", "tier"]


@pytest.fixture(params=["host", "disk", "remote", "objects"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    store: Any
    if request.param == "host":
        store = HostTier(Ledger(1 << 20))
    elif request.param == "disk":
        store = DiskTier(tmp_path / "cache", Ledger(1 << 20))
    elif request.param == "objects":
        store = ObjectTier(request.getfixturevalue("s3_server").url)
    else:
        store = RemoteTier(request.getfixturevalue("redis_server").url, timeout=5.0)
    yield store
    store.close()
