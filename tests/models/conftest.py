"""Tiny models run on one thread: two threads spend their time waiting for each other. A checkpoint
that a test may change is a copy of its own."""

import shutil
from collections.abc import Iterator
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
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pristine"), "llama")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))
