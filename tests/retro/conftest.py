"""Tiny models run on one thread: two threads spend their time waiting for each other."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint(family)``: the folder of a tiny random model."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def folder(family: str = "llama") -> Path:
        return make_checkpoint(root / family, family)

    return folder
