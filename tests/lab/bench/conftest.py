"""Benchmarks collect garbage before whatever they time: a second each in a process that has run
thousands of tests, whose objects need not be looked through."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """What there is now is left alone."""
    gc.freeze()
    yield
    gc.unfreeze()
