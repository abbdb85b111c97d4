"""Checkpoints of every family and RoPE law, written once per session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint(family, rope_law)``: the folder of a tiny random model."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def folder(family: str = "llama", rope_law: str = "default") -> Path:
        return make_checkpoint(root / f"{family}-{rope_law}", family, rope_law)

    return folder
