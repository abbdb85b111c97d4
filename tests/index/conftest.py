"""Fixtures of index tests."""

from collections.abc import Iterator

import pytest
from jaxtyping import config


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Calls with arguments of wrong types reach the library, as they do outside of tests."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
