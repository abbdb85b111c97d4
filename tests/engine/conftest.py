"""Checkpoints of every family and RoPE law, written once per session."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from jaxtyping import config

from tests.checkpoints import make_checkpoint
from tests.tiers.redis_server import redis_server, shared_redis

__all__ = ["checkpoint", "redis_server", "shared_redis", "unchecked"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint(family, rope_law)``: the folder of a tiny random model."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def folder(family: str = "llama", rope_law: str = "default") -> Path:
        return make_checkpoint(root / f"{family}-{rope_law}", family, rope_law)

    return folder


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Calls with arguments of wrong types reach the library, as they do outside of tests."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
