"""Servers that tests share: an open one over the reference model, and one with tenants."""

from collections.abc import Iterator

import pytest

from tests.server.live import Live, live_server
from tests.server.tooled import tooled_server

KEYS = {"red": "red-key-0001", "blue": "blue-key-0001", "operator": "operator-key-0001"}


@pytest.fixture(scope="package")
def live() -> Iterator[Live]:
    """The reference model, open on the loopback."""
    with live_server() as server:
        yield server


@pytest.fixture(scope="package")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The reference model behind keys of two tenants and of an operator."""
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    lines = [f"{tenant} = {key}" for tenant, key in KEYS.items()]
    path.write_text("\n".join(["# tenants of the tests", *lines, ""]), encoding="utf-8")
    with live_server(config={"api_keys": str(path)}) as server:
        yield server


@pytest.fixture(scope="package")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The reference model with a chat template that shows tools and opens thoughts."""
    with tooled_server(tmp_path_factory.mktemp("tooled")) as server:
        yield server
